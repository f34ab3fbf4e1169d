//! Generated blocks count.

use super::*;

fn growing(track_output_blocks: bool) -> Bench {
    let router = RouterConfig { track_output_blocks, ..sized() };
    let config = SelectorConfig { router, overlap: Overlap::Events, ..SelectorConfig::default() };
    configured(config, CatalogOptions::default(), 1)
}

fn blocks_after(bench: &Bench, held: &Reservation, generated: &[u64]) -> Vec<u64> {
    let mut blocks = Vec::new();
    for tokens in generated {
        held.generated(*tokens);
        blocks.push(bench.selector.totals().blocks);
    }
    blocks
}

#[test]
fn an_answer_grows_by_a_block_with_every_block_of_tokens() {
    let bench = growing(true);
    let prompt = bench.prompt(&[1; 16]);
    let (held, _) = bench.selector.select(&Ask::new(&prompt)).unwrap();
    // 16 equal tokens are four different blocks: each has another beginning.
    assert_eq!(bench.selector.totals().blocks, 4);
    let grown = blocks_after(&bench, &held, &[0, 3, 4, 7, 8, 40, 12, 41]);
    assert_eq!(grown, [4, 4, 5, 5, 6, 14, 14, 14], "what is told twice or late counts once");
    drop(held);
    assert!(bench.is_idle());
}

#[test]
fn what_only_it_uses_fades_towards_the_expected_end() {
    let bench = growing(true);
    let prompt = bench.prompt(&[1; 16]);
    let ask = Ask { expected_output_tokens: Some(8), ..Ask::new(&prompt) };
    let (held, _) = bench.selector.select(&ask).unwrap();
    // Half of the answer: five blocks count half; all of it: none does.
    assert_eq!(blocks_after(&bench, &held, &[4, 8, 80]), [3, 0, 0]);
    drop(held);
    assert!(bench.is_idle());
}

#[test]
fn nothing_grows_unless_it_is_asked_for_and_endless_answers_have_a_limit() {
    let bench = growing(false);
    let prompt = bench.prompt(&[1; 16]);
    let (held, _) = bench.selector.select(&Ask::new(&prompt)).unwrap();
    assert_eq!(blocks_after(&bench, &held, &[100]), [4]);
    let bench = growing(true);
    bench.selector.reserve("r", &Ask::new(&prompt)).unwrap();
    bench.selector.note_generated("r", u64::MAX);
    bench.selector.note_generated("nobody", 1);
    assert_eq!(bench.selector.totals().blocks, 4 + (1 << 20));
    assert!(bench.selector.free("r"));
    assert!(bench.is_idle());
    let vain = RouterConfig {
        track_active_blocks: false,
        track_output_blocks: true,
        ..RouterConfig::default()
    };
    let error = vain.validate().err().unwrap().to_string();
    assert_eq!(error, "track_output_blocks requires track_active_blocks");
}
