//! py (being written)
