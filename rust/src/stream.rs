//! stream (being written)
