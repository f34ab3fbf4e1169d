//! hash (being written)
