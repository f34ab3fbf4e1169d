//! http (being written)
