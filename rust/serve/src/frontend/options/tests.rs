//! Tests of options and aliases.

use super::*;

#[test]
fn the_key_for_workers_comes_from_a_file_or_a_flag() {
    let path = std::env::temp_dir().join(format!("kvflash-key-{}", std::process::id()));
    let mut options = FrontendOptions::default();
    assert_eq!(options.api_key().unwrap(), None);
    options.own.worker_api_key_file = Some(path.clone());
    let mut fails_with = |text: Option<&str>, key: Option<&str>| {
        text.into_iter().for_each(|text| std::fs::write(&path, text).unwrap());
        options.own.worker_api_key = key.map(str::to_owned);
        options.api_key().map_err(|error| error.to_string())
    };
    assert!(fails_with(None, None).unwrap_err().contains("No such file"));
    assert!(fails_with(Some(" \n"), None).unwrap_err().contains("the file is empty"));
    assert_eq!(fails_with(Some("secret\n"), None).unwrap().as_deref(), Some("secret"));
    let twice = fails_with(None, Some("other")).unwrap_err();
    assert!(twice.contains("use one of them") && !twice.contains("other"), "{twice}");
    let options = FrontendOptions {
        own: FrontendSettings {
            worker_api_key: Some("secret\n".to_owned()),
            ..FrontendSettings::default()
        },
        ..FrontendOptions::default()
    };
    assert_eq!(options.api_key().unwrap().as_deref(), Some("secret"));
}

fn aliases(texts: &[&str]) -> Result<Aliases> {
    Aliases::parse(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>())
}

#[test]
fn shares_are_kept_and_keys_stay() {
    let aliases = aliases(&["g=a:90,b:10,c:0", "h=org/model:8b"]).unwrap();
    assert_eq!(aliases.model("h", None), Some("org/model:8b"));
    assert_eq!(aliases.model("a", None), None);
    let to_b = |keys: &mut dyn Iterator<Item = Option<String>>| {
        keys.filter(|key| aliases.model("g", key.as_deref()) == Some("b")).count()
    };
    let keyed = to_b(&mut (0..10_000).map(|n| Some(format!("session-{n}"))));
    assert!((850..1_150).contains(&keyed), "{keyed} of 10000");
    let drawn = to_b(&mut (0..10_000).map(|_| None));
    assert!((850..1_150).contains(&drawn), "{drawn} of 10000");
    for n in 0..100 {
        let key = format!("session-{n}");
        assert_eq!(aliases.model("g", Some(&key)), aliases.model("g", Some(&key)));
    }
    let all: Vec<_> =
        aliases.all().map(|(name, models)| (name, models.collect::<Vec<_>>())).collect();
    assert_eq!(all, [("g", vec!["a", "b"]), ("h", vec!["org/model:8b"])]);
    assert_eq!(aliases.models("g").collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(aliases.shares("g").collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn refusals_name_the_flag_and_what_came() {
    for (texts, wanted) in [
        (&["g"][..], "= is missing, got \"g\""),
        (&["=a"], "the name is empty"),
        (&["g="], "the name of a model is empty"),
        (&["g=a:1,:2"], "the name of a model is empty"),
        (&["g=a:-1"], "weights must be numbers in 0..=1e9"),
        (&["g=a:0"], "at least one must be above 0"),
        (&["g=a:inf,b:1"], "weights must be numbers"),
        (&["g=a", "g=b"], "defined twice"),
    ] {
        let error = aliases(texts).unwrap_err().to_string();
        assert!(error.contains("--model-alias") && error.contains(wanted), "{texts:?}: {error}");
    }
}
