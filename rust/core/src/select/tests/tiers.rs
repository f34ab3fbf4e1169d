//! The value of blocks outside the device.

use super::*;
use crate::select::TierWeights;

fn weighed(host: f64, disk: f64) -> Bench {
    let router = RouterConfig { tiers: TierWeights { host, disk }, ..sized() };
    let config = SelectorConfig { router, overlap: Overlap::Events, ..SelectorConfig::default() };
    configured(config, CatalogOptions::default(), 2)
}

fn radix_case(id: &str) -> Value {
    let text = include_str!("../../../../../tests/vectors/radix_cases.json");
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    cases.into_iter().find(|case| case["id"] == id).unwrap()
}

#[test]
fn recorded_credits_hold() {
    let case = radix_case("dynamo/tier-overlap/001");
    let (input, expected) = (&case["input"], &case["expected"]);
    let number = |name: &str| input[name].as_f64().unwrap();
    let count = |name: &str| input[name].as_u64().unwrap() as u32;
    let weights = TierWeights {
        host: number("host_cache_hit_weight"),
        disk: number("disk_cache_hit_weight"),
    };
    let host = count("device") + count("host_pinned");
    let all = host + count("disk") + count("external");
    let lower = f64::from(weights.milliblocks(count("device"), host, all)) / 1_000.0;
    let effective = f64::from(count("device")) + lower;
    assert_eq!(effective, expected["effective_overlap_blocks"].as_f64().unwrap());
    let tokens = effective * number("block_size");
    assert_eq!(tokens, expected["cached_tokens"].as_f64().unwrap());

    let case = radix_case("dynamo/tier-overlap/002");
    let (input, expected) = (&case["input"], &case["expected"]["7:1"]);
    let number = |name: &str| input[name].as_f64().unwrap();
    let weights = TierWeights {
        host: number("host_cache_hit_weight"),
        disk: number("disk_cache_hit_weight"),
    };
    let device = input["workers"]["7:1"]["device"].as_u64().unwrap() as u32;
    let host = expected["host_pinned_blocks"].as_u64().unwrap() as u32;
    let all = expected["disk_blocks"].as_u64().unwrap() as u32;
    let lower = f64::from(weights.milliblocks(device, host, all)) / 1_000.0;
    // There is no cache that all share here: its part of the recorded credit is added by hand.
    let shared = number("shared_cache_multiplier")
        * expected["shared_beyond_device_blocks"].as_f64().unwrap();
    let credit = number("overlap_score_credit") * f64::from(device) + lower + shared;
    let recorded = expected["router_credit_blocks"].as_f64().unwrap();
    assert!((credit - recorded).abs() < 1e-9, "{credit} {recorded}");
}

#[test]
fn blocks_in_host_memory_and_on_disks_save_their_share() {
    let tokens: Vec<u32> = (0..32).collect();
    let choose = |host: f64, disk: f64| {
        let bench = weighed(host, disk);
        // Worker 0 has two of eight blocks on its device, worker 1 one there, three in host memory and
        // two on disks.
        bench.store(worker(0), Tier::Device, &tokens[..8]);
        bench.store(worker(1), Tier::Device, &tokens[..4]);
        bench.store(worker(1), Tier::Host, &tokens[..16]);
        bench.store(worker(1), Tier::Disk, &tokens[..24]);
        let prompt = bench.prompt(&tokens);
        let (held, selection) = bench.selector.select(&Ask::new(&prompt)).unwrap();
        let told = (selection.overlap_blocks, selection.lower_blocks);
        (held.worker().instance_id, told, bench.selector.totals().prefill_tokens)
    };
    assert_eq!(choose(0.0, 0.0), (0, (2, 0), 24));
    assert_eq!(choose(0.2, 0.1), (0, (2, 0), 24), "0.8 blocks make no second one");
    // 1 + 3 * 0.75 + 2 * 0.25 = 3.75 blocks; whole ones are booked as saved.
    assert_eq!(choose(0.75, 0.25), (1, (1, 2), 20));
    assert_eq!(choose(0.0, 1.0), (1, (1, 2), 20));
    for host in [-0.1, f64::NAN] {
        let tiers = TierWeights { host, disk: 0.0 };
        let error = RouterConfig { tiers, ..RouterConfig::default() }.validate().err().unwrap();
        assert!(error.to_string().contains("host_cache_hit_weight"), "{error}");
    }
}

#[test]
fn a_prediction_and_the_tiers_behind_it_do_not_count_twice() {
    let router = sized();
    let overlap = Overlap::EventsAndPredictions;
    let config = SelectorConfig { router, overlap, ..SelectorConfig::default() };
    let options = CatalogOptions { predicted_ttl_ms: 60_000, ..CatalogOptions::default() };
    let bench = configured(config, options, 1);
    let tokens: Vec<u32> = (0..32).collect();
    bench.store(worker(0), Tier::Host, &tokens[..16]);
    let prompt = bench.prompt(&tokens);
    let ask = Ask::new(&prompt);
    let before = bench.selector.preview(&ask).unwrap().1;
    assert_eq!(before.candidates()[0].terms.lower_milliblocks, 3_000);
    assert_eq!(before.candidates()[0].terms.prefill_tokens, 32 - 12);
    bench.selector.model().index.predict(worker(0), prompt.seed, &prompt.locals);
    let after = bench.selector.preview(&ask).unwrap().1;
    let terms = after.candidates()[0].terms;
    assert_eq!((terms.predicted_blocks, terms.lower_milliblocks, terms.prefill_tokens), (8, 0, 0));
}
