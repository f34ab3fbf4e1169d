//! catalog (being written)
