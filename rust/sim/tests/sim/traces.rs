//! Recorded traces that cannot be played.

use std::path::Path;

use kvflash_sim::workload::Workload;

#[test]
fn a_trace_without_requests_is_refused() {
    let path = Path::new("/dev/null");
    for read in [Workload::conversations(path, 1.0), Workload::agents(path, 30, 110_000, 120.0)] {
        let fault = read.expect_err("it is empty");
        assert_eq!(fault, "/dev/null: has no request that can be played");
    }
}
