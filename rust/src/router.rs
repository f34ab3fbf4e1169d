//! router (being written)
