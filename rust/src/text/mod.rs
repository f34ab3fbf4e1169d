//! text (being written)
