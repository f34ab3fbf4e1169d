//! Guarantees of shadows with their own settings.

use super::*;

fn shadows(texts: &[&str]) -> crate::error::Result<Vec<std::sync::Arc<Shadow>>> {
    counting(texts, Counted::default(), &Settings::default())
}

fn counting(
    texts: &[&str],
    counted: Counted,
    settings: &Settings,
) -> crate::error::Result<Vec<std::sync::Arc<Shadow>>> {
    let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
    Shadow::of_texts(&texts, settings, counted, &mut SmallRng::seed_from_u64(1), 5)
}

/// A worker that holds the prompt and is busy with everything, and one that is idle.
fn busy_and_idle() -> [Candidate; 2] {
    let load = ActiveLoad {
        requests: 2,
        prefill_tokens: 96,
        blocks: 7,
        context_tokens: 320,
        ..ActiveLoad::default()
    };
    let held = Candidate { overlap_blocks: 4, shared_blocks: 1, ..candidate(0, load) };
    [held, candidate(1, ActiveLoad::default())]
}

/// The choice of a shadow for a prompt of four blocks.
fn wanted(text: &str) -> u64 {
    let list = busy_and_idle();
    let request = RequestTerms { isl_tokens: 64, block_size: 16, tracked_blocks: 4, ..REQUEST };
    let choice = Choice { index: 0, ties: 1, margin: None, reason: Reason::Turn, score: None };
    let shadow = &shadows(&[text]).unwrap()[0];
    let context = Context::new(request, "m", 0);
    shadow.observe(&context, &Candidates::new(&list), &choice).unwrap().instance_id
}

#[test]
fn a_shadow_judges_by_its_own_settings() {
    // The busy one costs 6 queued + 7 + 3 blocks, the idle one 4 to prefill + 4.
    assert_eq!(wanted("kv"), 1);
    for settings in [
        "overlap_score_weight=0,active_request_weight=9",
        "track_active_blocks=false",
        "overlap_score_credit=2",
        "track_prefill_tokens=false,prefill_load_scale=1",
        "active_request_weight=1",
    ] {
        assert_eq!(wanted(&format!("kv:{settings}")), 1, "{settings}");
    }
    for settings in [
        "track_prefill_tokens=false,overlap_score_weight=2",
        "track_active_blocks=false,track_prefill_tokens=false",
        "overlap-score-credit=3.5, track-active-blocks=0",
        "router_kv_overlap_score_credit=3.5,router-track-active-blocks=False",
        "kv_overlap_score_weight=8,TRACK_PREFILL_TOKENS=f",
    ] {
        assert_eq!(wanted(&format!("kv:{settings}")), 0, "{settings}");
    }
    // Without reuse the requests there hold 20 blocks, and this one four more on each.
    assert_eq!(wanted("kv:track_prefill_tokens=false,overlap_score_weight=3"), 0);
    assert_eq!(
        wanted("kv:track_prefill_tokens=false,overlap_score_weight=3,assume_kv_reuse=false"),
        1
    );
}

#[test]
fn a_temperature_of_its_own_spreads_its_choices() {
    let mut list = [1, 2, 3].map(|id| candidate(id, ActiveLoad::default()));
    list[2].load.requests = 1;
    let context = Context::new(RequestTerms { block_size: 16, ..REQUEST }, "m", 0);
    let choice = Choice { index: 0, ties: 1, margin: None, reason: Reason::Turn, score: None };
    for (text, is_spread) in [
        ("kv:temperature=5,active_request_weight=2", true),
        ("kv:active_request_weight=2", false),
        ("auto:temperature=5", true),
        ("auto", false),
    ] {
        let shadow = &shadows(&[text]).unwrap()[0];
        let last = (0..60).filter(|_| {
            let wanted = shadow.observe(&context, &Candidates::new(&list), &choice);
            wanted == Some(list[2].worker)
        });
        assert_eq!(last.count() > 0, is_spread, "{text}");
    }
}

#[test]
fn a_shadow_is_called_as_it_was_given() {
    let texts = [
        " kv:overlap_score_weight=8, temperature=0.5 ",
        "kv",
        "prefix-cache:2,least-request:1",
        "round-robin",
    ];
    let names: Vec<String> =
        shadows(&texts).unwrap().iter().map(|shadow| shadow.name().to_owned()).collect();
    assert_eq!(
        names,
        [
            "kv:overlap_score_weight=8, temperature=0.5",
            "kv",
            "prefix-cache:2,least-request:1",
            "round_robin"
        ]
    );
}

#[test]
fn variables_of_a_policy_are_settings_too() {
    let set = |name: &str| (name == "AIBRIX_PREFIX_CACHE_BLOCK_SIZE").then(|| "64".to_owned());
    let settings = Settings::read(Profile::Document, set).unwrap();
    let other = [("PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "0.5".to_owned())];
    let prefix = settings.with(&other).unwrap().prefix;
    assert_eq!((prefix.block_size, prefix.standard_deviation_factor), (64, 0.5));
    let counted = Counted::default();
    for text in [
        "prefix-cache:prefix_cache_standard_deviation_factor=0.5",
        "prefix_cache:PREFIX-CACHE-BLOCK-SIZE=32,prefix_cache_tokenizer_type=tiktoken",
        "vtc-basic:router_vtc_basic_fairness_weight=3",
        "session-affinity:session_max_sessions=7",
    ] {
        let made = counting(&[text], counted, &settings);
        assert_eq!(made.unwrap()[0].name(), text);
    }
}

#[test]
fn faults_name_the_parameter_and_what_is_legal() {
    let all = "overlap_score_weight, overlap_score_credit, overlap_score_credit_decay, \
               prefill_load_scale, active_request_weight, temperature, track_active_blocks, \
               track_prefill_tokens, assume_kv_reuse";
    let five = ["kv", "auto", "random", "prefix-cache", "least-request"];
    for (texts, wanted) in [
        (&["kv:weight=8"][..], format!("kv has no parameter \"weight\"; it takes {all}")),
        (&["random:temperature=1"], "random takes no parameters, got \"temperature\"".into()),
        (&["kv:temperature=-1"], "temperature must be finite and at least 0, got \"-1\"".into()),
        (&["kv:temperature=inf"], "temperature must be finite and at least 0".into()),
        (&["kv:temperature="], "temperature must be finite and at least 0, got \"\"".into()),
        (&["kv:assume_kv_reuse=no"], "assume_kv_reuse must be true or false, got \"no\"".into()),
        (&["kv:temperature=1,router_temperature=1"], "temperature is given twice".into()),
        (&["kv:temperature=1,random:1"], "\"random:1\" is not PARAMETER=VALUE".into()),
        (&["fastest:temperature=1"], "policy must be one of auto, kv".into()),
        (&["kv:1,random:1"], "has no scores".into()),
        (&["kv:x"], "the weight of \"kv\" must be an integer".into()),
        (&["kv:temperature"], "settings of a shadow are written NAME:PARAMETER=VALUE".into()),
        (&["python:mine:Policy"], "a policy in Python can't be a shadow".into()),
        (
            &["prefix-cache:prefix_cache_block_size=0"],
            "prefix_cache_block_size must be an integer in 1..=1048576, got \"0\"".into(),
        ),
        (&["kv", "kv"], "\"kv\" is given twice".into()),
        (
            &[
                "kv:temperature=1,overlap_score_weight=2",
                "kv:overlap-score-weight=2.0,temperature=1.0",
            ],
            "\"kv:overlap-score-weight=2.0,temperature=1.0\" is given twice".into(),
        ),
        (&five, "5 shadow policies; the limit is 4".into()),
    ] {
        let error = shadows(texts).unwrap_err().to_string();
        assert!(error.contains(&wanted), "{texts:?}: {error}");
    }
    assert_eq!(shadows(&["kv:temperature=1", "kv:temperature=2", "kv"]).unwrap().len(), 3);
    // Counts that the router does not keep can be left out, but not added.
    let counted = Counted { active_blocks: false, ..Counted::default() };
    let made = |text| counting(&[text], counted, &Settings::default());
    assert!(made("kv:track_active_blocks=false").is_ok());
    let error = made("kv:track_active_blocks=true").unwrap_err().to_string();
    assert!(
        error.contains("track_active_blocks must be false, because the router does not"),
        "{error}"
    );
    // Values that a profile would replace by a default are errors here.
    let compat = Settings::new(Profile::AibrixCompat);
    let text = "prefix-cache:prefix_cache_block_size=x";
    assert!(counting(&[text], Counted::default(), &compat).is_err());
}
