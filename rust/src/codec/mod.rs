//! codec (being written)
