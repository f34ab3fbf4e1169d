//! Text to tokens against Python's own libraries, and the cache against no cache.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use kvflash_core::error::Error;
use kvflash_core::text::{
    ChatRequest, ChatTemplate, ContentFormat, CutMode, Detokenizer, Effort, Prompt, Rendered,
    TextModel, Tokenizer, WallClock,
};
use proptest::prelude::*;
use serde_json::value::RawValue;
use serde_json::{Value, json};

const CACHE_BYTES: usize = 64 << 20;

fn vectors(name: &str) -> PathBuf {
    Path::new("../../tests/vectors").join(name)
}

fn tiny() -> PathBuf {
    vectors("tiny-llama")
}

/// A folder that goes with the value.
struct Folder(PathBuf);

impl Folder {
    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Leftovers are in cargo's target folder.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A folder with these files, made of JSON or text.
fn folder(files: &[(&str, Value)]) -> Folder {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("text-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
    let folder = Folder(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name));
    fs::create_dir_all(folder.path()).expect("a temporary folder");
    for (name, content) in files {
        let text = content.as_str().map_or_else(|| content.to_string(), str::to_owned);
        fs::write(folder.path().join(name), text).expect("a writable folder");
    }
    folder
}

fn template(source: &str, clock: WallClock) -> ChatTemplate {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    ChatTemplate::from_source(source, &tokens, clock).expect("a template that compiles")
}

/// The fields of a body that decide a chat's tokens.
fn request(body: &[u8]) -> ChatRequest<'_> {
    let fields: HashMap<&str, &RawValue> = serde_json::from_slice(body).expect("a request");
    let field = |name: &str| fields.get(name).map(|raw| raw.get()).filter(|raw| *raw != "null");
    let flag = |name: &str| field(name).map(|raw| raw == "true");
    ChatRequest {
        messages: field("messages"),
        places: None,
        tools: field("tools"),
        tool_choice: field("tool_choice"),
        documents: field("documents"),
        chat_template_kwargs: field("chat_template_kwargs"),
        chat_template: field("chat_template"),
        reasoning_effort: field("reasoning_effort"),
        truncate_prompt_tokens: field("truncate_prompt_tokens"),
        add_generation_prompt: flag("add_generation_prompt"),
        continue_final_message: flag("continue_final_message"),
        add_special_tokens: flag("add_special_tokens"),
    }
}

fn render(source: &str, body: &Value, clock: WallClock) -> Result<Rendered, Error> {
    let body = body.to_string();
    template(source, clock).render(&request(body.as_bytes()))
}

fn rendered(text: &str) -> Result<Rendered, Error> {
    Ok(Rendered::Text(text.to_owned()))
}

// ---- golden -------------------------------------------------------------------------------------

#[derive(serde::Deserialize)]
struct Golden {
    special_tokens: BTreeMap<String, String>,
    templates: BTreeMap<String, GoldenTemplate>,
    conversations: BTreeMap<String, Value>,
    cases: Vec<GoldenCase>,
}

#[derive(serde::Deserialize)]
struct GoldenTemplate {
    format: String,
    source: String,
}

#[derive(serde::Deserialize)]
struct GoldenCase {
    template: String,
    chat: String,
    text: Option<String>,
    ids: Option<Vec<u32>>,
}

fn golden() -> Golden {
    let bytes = fs::read(vectors("text/golden.json")).expect("golden.json");
    serde_json::from_slice(&bytes).expect("golden.json in its form")
}

#[test]
fn renders_and_tokenizes_as_python_does() {
    let golden = golden();
    let tokenizer = Tokenizer::from_folder(tiny(), CACHE_BYTES).expect("tiny-llama");
    let special: Vec<_> =
        golden.special_tokens.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let mut compiled = BTreeMap::new();
    for (name, wanted) in &golden.templates {
        let template = ChatTemplate::from_source(&wanted.source, &special, WallClock::default())
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let format = match wanted.format.as_str() {
            "parts" => ContentFormat::Parts,
            _ => ContentFormat::String,
        };
        assert_eq!(template.content_format("default"), Some(format), "{name}");
        compiled.insert(name.clone(), template);
    }
    let (mut texts, mut errors, mut wrong) = (0, 0, Vec::new());
    for case in &golden.cases {
        let body = golden.conversations[&case.chat].to_string();
        let request = request(body.as_bytes());
        let name = format!("{}/{}", case.template, case.chat);
        match (&case.text, compiled[&case.template].render(&request)) {
            (Some(wanted), Ok(Rendered::Text(got))) if *wanted == got => {
                texts += 1;
                let ids = tokenizer.encode(&got, false).expect("ids");
                assert_eq!(Some(&ids), case.ids.as_ref(), "{name}");
            }
            (None, Err(Error::InvalidArgument(_))) => errors += 1,
            (wanted, got) => wrong.push(format!("{name}\n  wanted {wanted:?}\n  got {got:?}")),
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(golden.cases.len(), golden.templates.len() * golden.conversations.len());
    assert!(golden.templates.len() >= 7 && golden.conversations.len() >= 12);
    assert!(texts >= 120 && errors >= 3, "only {texts} texts and {errors} errors were compared");
}

// ---- the cache ----------------------------------------------------------------------------------

fn added(id: u32, content: &str, flags: &[&str]) -> Value {
    let has = |flag| flags.contains(&flag);
    json!({"id": id, "content": content, "special": !has("plain"), "normalized": has("normalized"),
           "lstrip": has("lstrip"), "rstrip": has("rstrip"), "single_word": has("single_word")})
}

fn tiny_json() -> Value {
    let bytes = fs::read(tiny().join("tokenizer.json")).expect("tiny-llama");
    serde_json::from_slice(&bytes).expect("tiny-llama is JSON")
}

/// A vocabulary of these tokens, in this order.
fn vocabulary(tokens: impl IntoIterator<Item = String>) -> Value {
    let mut vocabulary = serde_json::Map::new();
    for token in tokens {
        let id = vocabulary.len();
        vocabulary.entry(token).or_insert(id.into());
    }
    vocabulary.into()
}

/// Byte-fallback BPE over SentencePiece-like text, as Llama 2 and its kin are published.
fn sentence_piece(normalizer: Value, pre_tokenizer: Value) -> Value {
    let merges = [["▁", "h"], ["▁h", "e"], ["l", "l"], ["ll", "o"], ["▁he", "llo"], ["▁", "▁"]];
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let letters = ('a'..='z').chain("▁.,!'0123456789".chars()).map(String::from);
    let merged = merges.iter().map(|[left, right]| format!("{left}{right}"));
    let special = ["<unk>", "<s>", "</s>", "<pad>", "<s>x"].map(str::to_owned);
    let tokens = special.into_iter().chain(bytes).chain(letters).chain(merged);
    json!({
        "version": "1.0",
        "added_tokens": [added(0, "<unk>", &[]), added(1, "<s>", &[]), added(2, "</s>", &[]),
                         added(3, "<pad>", &[]), added(4, "<s>x", &["plain"])],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
                  "vocab": vocabulary(tokens), "merges": merges},
    })
}

fn word_piece() -> Value {
    let special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "##llo"];
    let letters = ('a'..='z').flat_map(|letter| [letter.to_string(), format!("##{letter}")]);
    let marks = ".,!?'\"()0123456789".chars().map(String::from);
    let tokens = special.map(str::to_owned).into_iter().chain(letters).chain(marks);
    json!({
        "version": "1.0",
        "added_tokens": [added(0, "[PAD]", &[]), added(1, "[UNK]", &[]), added(2, "[CLS]", &[]),
                         added(3, "[SEP]", &[]), added(4, "[MASK]", &["lstrip"])],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                       "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocabulary(tokens)},
    })
}

/// One id for each pre-token, whatever is in it: merges cannot hide a wrong cut.
fn counting() -> Value {
    let mut tokenizer = tiny_json();
    let vocabulary = vocabulary(["<s>", "</s>", "<unk>"].map(str::to_owned));
    tokenizer["model"] = json!({"type": "WordLevel", "unk_token": "<unk>", "vocab": vocabulary});
    tokenizer
}

/// The pre-tokens of other models' splits, counted.
fn split_by(patterns: &[&str]) -> Value {
    let mut tokenizer = counting();
    let split = |pattern: &&str| {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
               "invert": false})
    };
    let mut stages: Vec<_> = patterns.iter().map(split).collect();
    stages.push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                       "use_regex": false}));
    tokenizer["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": stages});
    tokenizer
}

/// Splits as o200k and its kin publish them.
fn o200k() -> Value {
    split_by(&[concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )])
}

/// Splits in three stages, as DeepSeek publishes them.
fn three_stages() -> Value {
    split_by(&[
        r"\p{N}{1,3}",
        "[一-龥\u{3040}-ゟ゠-ヿ]+",
        concat!(
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|",
            r"\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ])
}

/// Llama 3's splits, with tokens of every kind of flag.
fn flagged() -> Value {
    let mut tokenizer = split_by(&[concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )]);
    tokenizer["normalizer"] = json!({"type": "NFC"});
    let size = tokenizer["model"]["vocab"].as_object().map_or(0, |vocab| vocab.len() as u32);
    let tokens = tokenizer["added_tokens"].as_array_mut().expect("a list");
    tokens.push(added(size, "<mask>", &["lstrip"]));
    tokens.push(added(size + 1, "<end>", &["rstrip"]));
    tokens.push(added(size + 2, "</s", &["plain"]));
    tokens.push(added(size + 3, "world", &["normalized", "plain"]));
    tokenizer
}

/// As DeepSeek's file has it: line ends as characters in the pattern, and a normalizer without stages.
fn bare_sequence() -> Value {
    let mut tokenizer = three_stages();
    tokenizer["normalizer"] = json!({"type": "Sequence", "normalizers": []});
    let stages = tokenizer["pre_tokenizer"]["pretokenizers"].as_array_mut().expect("stages");
    for stage in stages {
        if let Some(Value::String(pattern)) = stage.pointer_mut("/pattern/Regex") {
            *pattern = pattern.replace(r"\r", "\r").replace(r"\n", "\n");
        }
    }
    tokenizer
}

fn tokenizers() -> Vec<(&'static str, Value, CutMode)> {
    let metaspace = |scheme: &str, split: bool| {
        let kind = "Metaspace";
        json!({"type": kind, "replacement": "▁", "prepend_scheme": scheme, "split": split})
    };
    let prepend = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
    let mut single_word = tiny_json();
    single_word["added_tokens"][0]["single_word"] = true.into();
    vec![
        ("byte_level", tiny_json(), CutMode::AtWords),
        ("byte_level_words", counting(), CutMode::AtWords),
        ("o200k", o200k(), CutMode::AtWords),
        ("three_stages", three_stages(), CutMode::AtWords),
        ("bare_sequence", bare_sequence(), CutMode::AtWords),
        ("flagged", flagged(), CutMode::AtWords),
        ("first", sentence_piece(Value::Null, metaspace("first", false)), CutMode::AtTokens),
        ("always", sentence_piece(Value::Null, metaspace("always", true)), CutMode::AtTokens),
        ("prepend", sentence_piece(prepend, Value::Null), CutMode::AtTokens),
        ("word_piece", word_piece(), CutMode::AtTokens),
        ("single_word", single_word, CutMode::Whole),
    ]
}

struct Twins {
    name: &'static str,
    plain: tokenizers::Tokenizer,
    roomy: Tokenizer,
    cramped: Tokenizer,
}

fn twins() -> Vec<Twins> {
    let twin = |(name, json, mode)| {
        let folder = folder(&[("tokenizer.json", json)]);
        let load = |capacity_bytes| {
            Tokenizer::from_folder(folder.path(), capacity_bytes)
                .unwrap_or_else(|error| panic!("{name}: {error}"))
        };
        let (roomy, cramped) = (load(256 << 20), load(48 << 10));
        assert_eq!(roomy.cut_mode(), mode, "{name}");
        let path = folder.path().join("tokenizer.json");
        let plain = tokenizers::Tokenizer::from_file(path).expect("the same file");
        Twins { name, plain, roomy, cramped }
    };
    tokenizers().into_iter().map(twin).collect()
}

fn fragment() -> impl Strategy<Value = String> {
    let tokens = [
        "<s>", "</s>", "</s", "<pad>", "<s>x", "<unk>", "[CLS]", "[SEP]", "[MASK]", "<mask>",
        "<end>", "world", "WORLD",
    ];
    let words = [
        "hello",
        " hello",
        "don't",
        "THEY'LL",
        "12345",
        "x_y",
        "e\u{301}",
        "caf\u{e9}",
        "\u{4f60}\u{597d}",
        "\u{1f600}",
        ".",
        "...\n",
        "(",
        "\u{a0}",
        "\u{200b}",
        "\u{3000}",
        "'s",
        "\u{130}",
    ];
    let spaces = [" ", "  ", "\n", "\n\n", "\t", " \n ", "\r\n", ""];
    let long = "The quick brown fox isn't over the lazy dog (12,345 times)\n  or so; ";
    prop_oneof![
        3 => prop::sample::select(tokens.to_vec()).prop_map(str::to_owned),
        4 => prop::sample::select(words.to_vec()).prop_map(str::to_owned),
        3 => prop::sample::select(spaces.to_vec()).prop_map(str::to_owned),
        2 => any::<String>().prop_map(|text| text.chars().take(6).collect()),
        2 => "[a-z \n.]{0,40}",
        1 => (1usize..30).prop_map(move |times| long.repeat(times)),
        1 => "[a-zA-Z0-9' \n\u{e9}\u{301}.]{500,1500}",
        1 => "[a1.\u{e9} \n]{500,2500}",
    ]
}

#[test]
fn cached_ids_are_the_ids() {
    let twins = twins();
    assert_eq!(twins.len(), 11);
    let cases =
        std::env::var("KVFLASH_TOKEN_CASES").map_or(96, |count| count.parse().expect("a number"));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(cases));
    let texts = prop::collection::vec(fragment(), 0..24).prop_map(|parts| parts.concat());
    let result = runner.run(&texts, |text| {
        for twin in &twins {
            for adds in [false, true] {
                let plain = twin.plain.encode_fast(text.as_str(), adds).expect("ids");
                let plain = plain.get_ids();
                // Twice: once into the cache, once out of it.
                for tokenizer in [&twin.roomy, &twin.roomy, &twin.cramped] {
                    let ids = tokenizer.encode(&text, adds).expect("ids");
                    prop_assert_eq!(&ids, plain, "{} {}", twin.name, adds);
                }
            }
        }
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    for twin in &twins {
        // Random texts can all be too long for the small cache; these are not.
        for number in 0..1_024 {
            let text = format!("text {number}");
            let plain = twin.plain.encode_fast(text.as_str(), false).expect("ids");
            assert_eq!(twin.cramped.encode(&text, false).expect("ids"), plain.get_ids());
        }
        let (roomy, cramped) = (twin.roomy.cache_stats(), twin.cramped.cache_stats());
        assert!(roomy.hits_total > 256 && roomy.evictions_total == 0, "{} {roomy:?}", twin.name);
        assert!(cramped.held_bytes <= cramped.capacity_bytes, "{} {cramped:?}", twin.name);
        assert!(cramped.evictions_total > 0, "{}: no pressure", twin.name);
    }
}

#[test]
fn a_growing_conversation_is_tokenized_once() {
    let model = TextModel::from_folder(tiny(), CACHE_BYTES).expect("tiny-llama");
    let template = model.template.as_ref().expect("a template");
    let (mut messages, mut misses) = (Vec::new(), Vec::new());
    for turn in 0..8 {
        messages.push(json!({"role": "user", "content": format!("question {turn} ").repeat(20)}));
        let body = json!({"messages": messages}).to_string();
        let request = request(body.as_bytes());
        let before = model.tokenizer.cache_stats().misses_total;
        let Ok(Prompt::Tokens(ids)) = model.chat_tokens(&request) else { panic!("no tokens") };
        misses.push(model.tokenizer.cache_stats().misses_total - before);
        let Ok(Rendered::Text(text)) = template.render(&request) else { panic!("no text") };
        assert_eq!(ids, model.tokenizer.encode_uncached(&text, false).expect("ids"));
    }
    // Each turn adds a piece, and changes the one that the answer was to follow.
    assert!(misses[1..].iter().all(|&count| count <= 2), "{misses:?}");
}

#[test]
fn a_quick_try_makes_few_new_tokens_and_keeps_them() {
    let model = TextModel::from_folder(tiny(), CACHE_BYTES).expect("tiny-llama");
    let quick = Effort { text_bytes: 100_000, is_quick: true };
    let tokens = |text: &str| model.text_tokens(text, false, quick).expect("no error");
    assert!(matches!(tokens("a short text"), Prompt::Tokens(_)));
    // No word twice, none of them known.
    let long: String = (0..2_000).map(|n| format!("w{n}x{} ", n * 7_919)).collect();
    assert_eq!(tokens(&long), Prompt::Costly);
    let whole = model.text_tokens(&long, false, Effort { is_quick: false, ..quick });
    let Ok(Prompt::Tokens(ids)) = whole else { panic!("no tokens") };
    assert_eq!(ids, model.tokenizer.encode_uncached(&long, false).expect("ids"));
    assert_eq!(tokens(&long), Prompt::Tokens(ids), "it is known now");
    let unbroken = "a".repeat(50_000);
    assert_eq!(tokens(&unbroken), Prompt::Costly);
    assert_eq!(tokens(&"a".repeat(100_001)), Prompt::TooLong);
}

// ---- around the text ----------------------------------------------------------------------------

#[test]
fn special_tokens_follow_post_processor_and_config() {
    let json = sentence_piece(Value::Null, Value::Null);
    let load = |files: &[(&str, Value)]| {
        let folder = folder(files);
        TextModel::from_folder(folder.path(), CACHE_BYTES).expect("a model")
    };
    let ids = |model: &TextModel, adds| model.completion_tokens("a", adds).expect("ids");
    let plain = load(&[("tokenizer.json", json.clone())]);
    let a = plain.tokenizer.token_to_id("a").expect("a letter");
    assert_eq!((ids(&plain, true), ids(&plain, false)), (vec![1, a], vec![a]));
    let config = json!({"add_bos_token": false, "add_eos_token": true, "bos_token": "<s>",
                        "eos_token": {"content": "</s>"}});
    let told = load(&[("tokenizer.json", json.clone()), ("tokenizer_config.json", config)]);
    assert_eq!((ids(&told, true), ids(&told, false)), (vec![a, 2], vec![a]));
    // A token that only the configuration knows.
    let config = json!({"added_tokens_decoder": {"900": {"content": "<tool>", "special": true}}});
    let more = load(&[("tokenizer.json", json), ("tokenizer_config.json", config)]);
    let tool = more.tokenizer.token_to_id("<tool>").expect("an added token");
    assert_eq!(more.completion_tokens("a<tool>a", false).expect("ids"), [a, tool, a]);
}

#[test]
fn truncation_of_the_file_is_ignored() {
    let mut json = tiny_json();
    json["truncation"] = json!({"direction": "Right", "max_length": 2,
                                "strategy": "LongestFirst", "stride": 0});
    let folder = folder(&[("tokenizer.json", json)]);
    let tokenizer = Tokenizer::from_folder(folder.path(), CACHE_BYTES).expect("loads");
    assert!(tokenizer.encode("a b c d e f", false).expect("ids").len() > 2);
}

#[test]
fn a_model_without_a_vocabulary_loads() {
    let json = json!({"version": "1.0", "added_tokens": [], "normalizer": null,
                      "pre_tokenizer": null, "post_processor": null, "decoder": null,
                      "model": {"type": "BPE", "vocab": {}, "merges": []}});
    let folder = folder(&[("tokenizer.json", json)]);
    let tokenizer = Tokenizer::from_folder(folder.path(), CACHE_BYTES).expect("loads");
    assert_eq!(tokenizer.encode("abc", true), Ok(Vec::new()));
}

#[test]
fn load_errors_name_the_file() {
    let load = |files: &[(&str, Value)]| {
        let folder = folder(files);
        TextModel::from_folder(folder.path(), CACHE_BYTES).err()
    };
    let cases = [
        (load(&[]), "tokenizer.json"),
        (load(&[("tokenizer.json", json!("{"))]), "tokenizer.json"),
        (load(&[("tokenizer.json", json!({"model": 1}))]), "tokenizer.json"),
        (load(&[("tokenizer_config.json", json!("nonsense"))]), "tokenizer_config.json"),
        (
            load(&[("tokenizer.json", tiny_json()), ("chat_template.jinja", json!("{% if %}"))]),
            "chat_template.jinja: chat template \"default\"",
        ),
        (
            load(&[
                ("tokenizer.json", tiny_json()),
                ("tokenizer_config.json", json!({"chat_template": "{% if %}"})),
            ]),
            "tokenizer_config.json: chat template \"default\"",
        ),
    ];
    for (error, name) in cases {
        match error {
            Some(Error::Config(message)) => assert!(message.contains(name), "{message}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

// ---- templates ----------------------------------------------------------------------------------

#[test]
fn templates_are_chosen_as_transformers_does() {
    let named =
        json!([{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]);
    let files = [("tokenizer_config.json", json!({"chat_template": named, "bos_token": "<s>"}))];
    let render = |files: &[(&str, Value)], body: Value| {
        let folder = folder(files);
        let template = ChatTemplate::from_folder(folder.path());
        let body = body.to_string();
        let request = request(body.as_bytes());
        template.expect("loads").map(|template| template.render(&request))
    };
    let tool = json!({"type": "function", "function": {"name": "f"}});
    assert_eq!(render(&files, json!({"messages": []})), Some(rendered("D")));
    assert_eq!(render(&files, json!({"messages": [], "tools": [tool]})), Some(rendered("T")));
    let with_file = [files[0].clone(), ("chat_template.jinja", json!("{{ bos_token }}J"))];
    assert_eq!(render(&with_file, json!({"messages": []})), Some(rendered("<s>J")));
    assert_eq!(render(&[], json!({"messages": []})), None);
}

#[test]
fn values_are_written_as_python_writes_them() {
    let body = json!({
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"documents": [{"text": "kept"}], "family": "\u{1f469}\u{200d}\u{1f467}"},
    });
    let source = r"{{ ['a'] + ['b'] }} {{ [family] }} {{ '\U0001F469\/' }} {{ documents }}
        {%- set ns = namespace(l=[]) %}
        {%- for m in messages %}{% set ns.l = ns.l + [m.role] %}{% endfor %} {{ ns.l }}";
    let wanted =
        "['a', 'b'] ['\u{1f469}\\u200d\u{1f467}'] \u{1f469}\\/ [{'text': 'kept'}] ['user']";
    assert_eq!(render(source, &body, WallClock::default()), rendered(wanted));
    let own = json!({"messages": [], "documents": [1], "chat_template_kwargs": {"documents": [2]}});
    assert_eq!(render("{{ documents }}", &own, WallClock::default()), rendered("[1]"));
    let none = json!({"messages": []});
    assert_eq!(render("{{ documents }}", &none, WallClock::default()), rendered("None"));
}

#[test]
fn lines_of_templates_end_as_jinja_ends_them() {
    let unix = "{% for m in messages %}\n  {%- if m.role %}\n{{ m.content + 'a\nb' }}\n  {% endif %}\n{% endfor %}\n{{ 1 }}\n";
    let body = json!({"messages": [{"role": "user", "content": "x\r\ny"}]});
    let wanted = render(unix, &body, WallClock::default());
    assert_eq!(wanted, rendered("x\r\nya\nb\n1"));
    for end in ["\r\n", "\r"] {
        let source = unix.replace('\n', end);
        assert_eq!(render(&source, &body, WallClock::default()), wanted, "{end:?}");
        let folder = folder(&[("chat_template.jinja", source.into())]);
        let template = ChatTemplate::from_folder(folder.path());
        let template = template.expect("loads").expect("a template");
        let body = body.to_string();
        let request = request(body.as_bytes());
        assert_eq!(template.render(&request), wanted, "{end:?}");
    }
}

#[test]
fn what_cannot_be_reproduced_is_said_and_not_guessed() {
    let source = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let image = json!({"messages": [{"role": "user", "content": [
        {"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]}]});
    let own = json!({"messages": [], "chat_template": "{{ 1 }}"});
    for body in [image, own] {
        let rendered = render(source, &body, WallClock::default());
        assert!(matches!(rendered, Ok(Rendered::Unsupported(_))), "{rendered:?}");
    }
    let coded = folder(&[
        ("tokenizer.json", tiny_json()),
        ("config.json", json!({"model_type": "gpt_oss"})),
        ("chat_template.jinja", json!("x")),
    ]);
    let model = TextModel::from_folder(coded.path(), CACHE_BYTES).expect("a model");
    let prompt = model.chat_tokens(&request(b"{}"));
    assert!(matches!(prompt, Ok(Prompt::Unsupported(_))), "{prompt:?}");
    let model = TextModel::from_folder(tiny(), CACHE_BYTES).expect("tiny-llama");
    let body = br#"{"messages": [], "truncate_prompt_tokens": 5}"#;
    let prompt = model.chat_tokens(&request(body));
    assert!(matches!(prompt, Ok(Prompt::Unsupported(_))), "{prompt:?}");
}

#[test]
fn wrong_requests_are_refused() {
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    // The message begins with the field.
    let wrong = [
        ("messages", json!({})),
        ("messages", json!({"messages": 1})),
        ("messages[0]", json!({"messages": [1]})),
        ("messages[0].role", json!({"messages": [{"content": "no role"}]})),
        ("messages[0].content", json!({"messages": user(json!(5))})),
        ("messages[0].content", json!({"messages": user(json!([{"type": "text", "text": 5}]))})),
        ("tools", json!({"messages": [], "tools": {}})),
        ("chat_template_kwargs", json!({"messages": [], "chat_template_kwargs": []})),
        (
            "chat_template_kwargs",
            json!({"messages": [], "chat_template_kwargs": {"tokenize": true}}),
        ),
        (
            "continue_final_message",
            json!({"messages": user(json!("x")), "continue_final_message": true}),
        ),
    ];
    for (field, body) in wrong {
        let rendered = render("{{ messages }}", &body, WallClock::default());
        let Err(Error::InvalidArgument(message)) = rendered else { panic!("{body}: {rendered:?}") };
        assert_eq!(message.split_once(": ").map(|(head, _)| head), Some(field), "{message}");
    }
    let source = "{{ raise_exception('no ' ~ 1) }}";
    let raised = render(source, &json!({"messages": []}), WallClock::default());
    let Err(Error::InvalidArgument(message)) = raised else { panic!("{raised:?}") };
    assert!(message.contains("no 1"), "{message}");
}

#[test]
fn requests_are_prepared_as_by_vllm() {
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let body = json!({
        "messages": [{"role": "user", "content": parts, "x": 1}],
        "tools": [{"type": "function", "function": {"parameters": {}, "name": "f"}}],
        "reasoning_effort": "low",
    });
    let source = "{{ messages | tojson }}{{ tools | tojson }}{{ reasoning_effort }}";
    let expected = concat!(
        r#"[{"role": "user", "content": "a\nb"}]"#,
        r#"[{"type": "function", "function": {"name": "f", "description": null, "#,
        r#""parameters": {}}}]low"#
    );
    assert_eq!(render(source, &body, WallClock::default()), rendered(expected));
}

#[test]
fn kwargs_and_the_date_reach_the_template() {
    let body = json!({
        "messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}],
        "chat_template_kwargs": {"a": 1, "b": [null, 3.0]},
        "add_generation_prompt": false,
    });
    // A template with this loop gets parts.
    let source = "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}\
                  {{ a }} {{ b }} {{ strftime_now('%d %b %Y') }} \
                  {{ messages[0].content | tojson }} {{ messages[1].content }} \
                  {{ add_generation_prompt }}";
    let expected = r#"1 [None, 3.0] 29 Feb 2024 [{"type": "text", "text": "x"}] y False"#;
    assert_eq!(render(source, &body, WallClock::fixed(1_709_211_909)), rendered(expected));
}

// ---- back to text -------------------------------------------------------------------------------

#[test]
fn increments_make_up_the_text() {
    let tiny = Tokenizer::from_folder(tiny(), CACHE_BYTES).expect("tiny-llama");
    let size = tiny.vocabulary_size() as u32;
    let folder = folder(&[("tokenizer.json", sentence_piece(Value::Null, Value::Null))]);
    let fallback = Tokenizer::from_folder(folder.path(), CACHE_BYTES).expect("loads");
    let check = |tokenizer: &Tokenizer, ids: &[u32], skip| {
        let mut stream = Detokenizer::new(tokenizer, skip);
        let mut text = String::new();
        for &id in ids {
            text.push_str(&stream.push(id).expect("text"));
        }
        text.push_str(&stream.finish().expect("text"));
        prop_assert_eq!(text, tokenizer.decode(ids, skip).expect("text"));
        Ok(())
    };
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(256));
    let ids = prop::collection::vec(0..size, 0..60);
    let texts = prop::collection::vec(fragment(), 0..8).prop_map(|parts| parts.concat());
    let result = runner.run(&(ids, texts, any::<bool>()), |(ids, text, skip)| {
        check(&tiny, &ids, skip)?;
        check(&tiny, &tiny.encode(&text, false).expect("ids"), skip)?;
        check(&fallback, &fallback.encode(&text, false).expect("ids"), skip)
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn no_increment_ends_inside_a_character() {
    let tokenizer = Tokenizer::from_folder(tiny(), CACHE_BYTES).expect("tiny-llama");
    let ids = tokenizer.encode("a\u{1f600}b", false).expect("ids");
    let mut stream = Detokenizer::new(&tokenizer, true);
    let parts: Vec<_> = ids.iter().map(|&id| stream.push(id).expect("text")).collect();
    assert!(parts.contains(&"\u{1f600}".to_owned()), "{parts:?}");
    assert!(parts.iter().all(|part| !part.contains(char::REPLACEMENT_CHARACTER)), "{parts:?}");
}

#[test]
fn bytes_without_an_end_spoil_nothing_before_them() {
    let folder = folder(&[("tokenizer.json", sentence_piece(Value::Null, Value::Null))]);
    let tokenizer = Tokenizer::from_folder(folder.path(), CACHE_BYTES).expect("loads");
    let ids = tokenizer.encode("a\u{65e5}\u{672c}", false).expect("ids");
    for cut in 1..=2 {
        let mut stream = Detokenizer::new(&tokenizer, true);
        let ids = &ids[..ids.len() - cut];
        let mut text: String = ids.iter().map(|&id| stream.push(id).expect("text")).collect();
        assert_eq!(text, "a\u{65e5}");
        text.push_str(&stream.finish().expect("text"));
        // As the library writes them: one for each byte that makes no character.
        assert_eq!(text, format!("a\u{65e5}{}", "\u{fffd}".repeat(3 - cut)));
    }
    let mut broken = ids.clone();
    let x = tokenizer.token_to_id("x").expect("a letter");
    broken.splice(ids.len() - 1.., [x]);
    let mut stream = Detokenizer::new(&tokenizer, true);
    let text: String = broken.iter().map(|&id| stream.push(id).expect("text")).collect();
    assert_eq!(text, "a\u{65e5}\u{fffd}\u{fffd}x");
}

// ---- figures ------------------------------------------------------------------------------------

/// Pseudo-random English-like text: the same in every run.
struct Prompts(u64);

impl Prompts {
    fn next(&mut self, chars: usize) -> String {
        let words =
            ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "router", "cache"];
        let mut text = String::new();
        while text.len() < chars {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
            text.push_str(words[(self.0 >> 33) as usize % words.len()]);
            text.push_str(if (self.0 >> 50).is_multiple_of(9) { ".\n" } else { " " });
        }
        text
    }

    /// Words outside of all vocabularies.
    fn strange(&mut self, chars: usize) -> String {
        let mut text = String::new();
        while text.len() < chars {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
            text.push_str(&format!("{:x} ", self.0 >> 24));
        }
        text
    }

    /// A conversation of six messages and 4,500 characters.
    fn conversation(&mut self) -> Vec<Value> {
        let mut messages = vec![json!({"role": "system", "content": self.next(1_500)})];
        for _ in 0..2 {
            messages.push(json!({"role": "user", "content": self.next(400)}));
            messages.push(json!({"role": "assistant", "content": self.next(800)}));
        }
        messages.push(json!({"role": "user", "content": self.next(600)}));
        messages
    }
}

/// The manuals: prose, tables and code.
fn prose() -> Vec<String> {
    let files = fs::read_dir("docs").expect("the manuals").map(|file| file.expect("a file").path());
    let manuals = files.filter(|path| path.extension().is_some_and(|end| end == "md"));
    manuals.map(|path| fs::read_to_string(path).expect("a manual")).collect()
}

fn chunks(text: &str, chars: usize) -> Vec<String> {
    let all: Vec<char> = text.chars().collect();
    all.chunks(chars).map(|chunk| chunk.iter().collect()).collect()
}

fn report(name: &str, count: usize, run: impl FnOnce()) {
    let begin = Instant::now();
    run();
    let each = begin.elapsed().as_secs_f64() / count as f64;
    println!("{name}: mean {:.1} us, {:.0}/s on one thread", each * 1e6, 1.0 / each);
}

fn chat(model: &TextModel, body: &str) {
    let request = request(body.as_bytes());
    model.chat_tokens(&request).expect("tokens");
}

/// `cargo test --release --test all text::measure -- --ignored --nocapture`
#[test]
#[ignore = "a measurement, not a check"]
fn measure() {
    let model = TextModel::from_folder(tiny(), CACHE_BYTES).expect("tiny-llama");
    let tokenizer = &model.tokenizer;
    let mut prompts = Prompts(1);
    let texts: Vec<_> = (0..200).map(|_| prompts.next(4_500)).collect();
    let mut tokens = 0;
    report("encode 4,500 characters, cold", texts.len(), || {
        for text in &texts {
            tokens += tokenizer.encode(text, false).expect("ids").len();
        }
    });
    println!("  {} tokens each", tokens / texts.len());
    report("encode 4,500 characters, whole and uncached", texts.len(), || {
        for text in &texts {
            tokenizer.encode_uncached(text, false).expect("ids");
        }
    });
    let prose = prose();
    let fresh: Vec<_> = prose.iter().flat_map(|text| chunks(text, 4_500)).collect();
    report("encode 4,500 characters of prose, uncached", fresh.len(), || {
        for text in &fresh {
            tokenizer.encode_uncached(text, false).expect("ids");
        }
    });
    report("encode 4,500 characters of prose, cold", fresh.len(), || {
        for text in &fresh {
            tokenizer.encode(text, false).expect("ids");
        }
    });
    let strange: Vec<_> = (0..200).map(|_| prompts.strange(4_500)).collect();
    for (name, encode) in [
        ("uncached", Tokenizer::encode_uncached as fn(&Tokenizer, &str, bool) -> _),
        ("cold", Tokenizer::encode),
    ] {
        report(&format!("encode 4,500 characters of strange words, {name}"), strange.len(), || {
            for text in &strange {
                encode(tokenizer, text, false).expect("ids");
            }
        });
    }
    let shifted: Vec<_> = prose.iter().flat_map(|text| chunks(&text[1..], 3_300)).collect();
    report("encode 3,300 characters of prose cut elsewhere", shifted.len(), || {
        for text in &shifted {
            tokenizer.encode(text, false).expect("ids");
        }
    });
    report("encode 4,500 characters, warm", 50 * texts.len(), || {
        for text in std::iter::repeat_n(&texts, 50).flatten() {
            tokenizer.encode(text, false).expect("ids");
        }
    });
    let golden = golden();
    for name in ["tiny", "qwen_like"] {
        let model = TextModel {
            tokenizer: Tokenizer::from_folder(tiny(), CACHE_BYTES).expect("tiny"),
            template: Some(template(&golden.templates[name].source, WallClock::default())),
            chat_unsupported: None,
        };
        measure_chat(name, &model, &mut prompts);
    }
}

fn measure_chat(name: &str, model: &TextModel, prompts: &mut Prompts) {
    let template = model.template.as_ref().expect("a template");
    let bodies: Vec<_> =
        (0..100).map(|_| json!({"messages": prompts.conversation()}).to_string()).collect();
    let all = |times: usize| {
        for body in std::iter::repeat_n(&bodies, times).flatten() {
            chat(model, body);
        }
    };
    report(&format!("{name}: parse and render"), 20 * bodies.len(), || {
        for body in std::iter::repeat_n(&bodies, 20).flatten() {
            let request = request(body.as_bytes());
            template.render(&request).expect("text");
        }
    });
    report(&format!("{name}: chat, cold"), bodies.len(), || all(1));
    report(&format!("{name}: chat, warm"), 20 * bodies.len(), || all(20));
    let base = prompts.conversation();
    let grown: Vec<_> = (0..200)
        .map(|_| {
            let mut messages = base.clone();
            messages.push(json!({"role": "assistant", "content": prompts.next(100)}));
            messages.push(json!({"role": "user", "content": prompts.next(100)}));
            json!({"messages": messages}).to_string()
        })
        .collect();
    report(&format!("{name}: chat, 200 new characters each"), grown.len(), || {
        for body in &grown {
            chat(model, body);
        }
    });
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| all(20));
        }
    });
    let rate = (2 * 20 * bodies.len()) as f64 / begin.elapsed().as_secs_f64();
    println!("{name}: chat, warm: {rate:.0}/s on two threads");
    println!("  {:?}", model.tokenizer.cache_stats());
}
