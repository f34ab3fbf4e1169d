//! Tests that don't run beside others of their process. `make test` runs this program beside the
//! other ones, which it tells to skip the module by its name.

mod alone;
