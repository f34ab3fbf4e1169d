//! Tests of the text that clients see.

use std::path::Path;
use std::sync::LazyLock;

use super::super::tool_call::Call;
use super::*;

static TINY: LazyLock<Arc<ModelText>> = LazyLock::new(|| {
    Arc::new(ModelText::load(Path::new("../../tests/vectors/tiny-llama"), 1 << 20).unwrap())
});

fn model() -> Arc<ModelText> {
    Arc::clone(&TINY)
}

fn item(item: serde_json::Value) -> Item {
    Item::parse(&rmp_serde::to_vec_named(&item).unwrap()).unwrap()
}

/// The pieces of an answer whose tokens come `at_once` an item, and its end.
fn write(ids: &[u32], at_once: usize, limits: Limits) -> (Vec<String>, Ending, u64) {
    let generation = Generation { limits, ..Generation::default() };
    let mut writing = Writing::new(model(), &generation);
    let mut pieces = Vec::new();
    for ids in ids.chunks(at_once) {
        pieces.push(writing.take(&item(json!({ "token_ids": ids }))).unwrap());
        if writing.ending.is_some() {
            break;
        }
    }
    pieces.push(writing.end().unwrap());
    (pieces, writing.ending.unwrap(), writing.tokens)
}

#[test]
fn text_comes_in_whole_characters_however_the_tokens_are_cut() {
    let model = model();
    let text = "Grüße, \u{4f60}\u{597d} \u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467} and so on";
    let ids = model.model.tokenizer.encode(text, false).unwrap();
    let wanted = model.model.tokenizer.decode(&ids, true).unwrap();
    assert!(ids.len() > 12, "the text must be cut within characters: {}", ids.len());
    for at_once in 1..=ids.len() {
        let (pieces, ending, tokens) = write(&ids, at_once, Limits::default());
        assert_eq!(pieces.concat(), wanted, "{at_once} at once");
        assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
        assert_eq!((ending.reason.as_str(), tokens), ("stop", ids.len() as u64));
    }
}

#[test]
fn a_character_that_the_end_cuts_is_left_out() {
    let model = model();
    let tokenizer = &model.model.tokenizer;
    let ids = tokenizer.encode("ab \u{4f60}\u{1f600}", false).unwrap();
    let whole = tokenizer.decode(&ids, true).unwrap();
    let mut lengths = Vec::new();
    for tokens in 1..=ids.len() {
        let limits = Limits { max_tokens: Some(tokens as u64), ..Limits::default() };
        let (pieces, ending, _) = write(&ids, 1, limits);
        let (said, reason) = (pieces.concat(), ending.reason);
        assert!(whole.starts_with(&said) && reason == "length", "{tokens}: {said:?}, {reason}");
        let (pieces, _, _) = write(&ids[..tokens], ids.len(), Limits::default());
        assert_eq!(pieces.concat(), said, "the worker ends it itself");
        lengths.push(said.chars().count());
    }
    let is_cut = lengths.windows(2).any(|pair| pair[0] == pair[1]);
    assert!(is_cut && lengths.last() == Some(&whole.chars().count()), "{lengths:?}");
}

#[test]
fn a_stop_string_over_several_tokens_ends_the_text_before_it() {
    let ids = model().model.tokenizer.encode("one two three four five", false).unwrap();
    for at_once in 1..=ids.len() {
        let limits = Limits { stop: vec!["hree fo".into()], ..Limits::default() };
        let (pieces, ending, _) = write(&ids, at_once, limits);
        assert_eq!(pieces.concat(), "one two t", "{at_once} at once");
        assert_eq!(ending.stop_reason, Some(json!("hree fo")));
    }
    let limits = Limits { stop: vec!["one".into()], min_tokens: 1_000, ..Limits::default() };
    assert_eq!(write(&ids, 1, limits).0.concat(), "one two three four five");
}

#[test]
fn the_limit_of_tokens_holds_whatever_the_worker_sends() {
    let ids = model().model.tokenizer.encode("one two three four five", false).unwrap();
    for at_once in 1..=ids.len() {
        let limits = Limits { max_tokens: Some(3), ..Limits::default() };
        let (_, ending, tokens) = write(&ids, at_once, limits);
        assert_eq!((ending.reason.as_str(), tokens), ("length", 3));
    }
}

#[test]
fn tags_are_in_the_text_where_they_are_special_tokens() {
    let tiny = Path::new("../../tests/vectors/tiny-llama");
    let folder = std::env::temp_dir().join(format!("kvflash-writing-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = std::fs::read(tiny.join("tokenizer.json")).unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&file).unwrap();
    let id = model().model.tokenizer.vocabulary_size();
    for (at, tag) in ["[TOOL_CALLS]", "[ARGS]"].into_iter().enumerate() {
        let token = json!({
            "id": id + at, "content": tag, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        });
        tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
    }
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let text = Arc::new(ModelText::load(&folder, 1 << 20).unwrap());
    std::fs::remove_dir_all(&folder).unwrap();
    let ids = text.model.tokenizer.encode("Say[TOOL_CALLS]one[ARGS]{}", false).unwrap();
    for (tags, wanted) in [
        (&[][..], "Sayone{}"),
        (&["[TOOL_CALLS]", "Say", "[MISSING]"], "Say[TOOL_CALLS]one{}"),
        (&["[TOOL_CALLS]", "[ARGS]"], "Say[TOOL_CALLS]one[ARGS]{}"),
    ] {
        let writing = Writing::new(Arc::clone(&text), &Generation::default());
        let mut writing = writing.showing(tags).unwrap();
        let mut said = writing.take(&item(json!({ "token_ids": ids }))).unwrap();
        said.push_str(&writing.end().unwrap());
        assert_eq!(said, wanted);
    }
}

#[test]
fn tokens_that_end_an_answer_leave_no_text() {
    let model = model();
    let eos = *model.eos_token_ids.first().unwrap();
    let mut ids = model.model.tokenizer.encode("one two", false).unwrap();
    let (tail, before) = (ids.clone(), ids.len() as u64);
    ids.push(eos);
    ids.extend(&tail);
    let (pieces, ending, tokens) = write(&ids, 1, Limits::default());
    assert_eq!((pieces.concat().as_str(), tokens), ("one two", before + 1));
    assert_eq!(ending, Ending::plain("stop"));
    let limits = Limits { ignore_eos: true, ..Limits::default() };
    assert!(write(&ids, 1, limits).0.concat().len() > "one two".len());
    let limits = Limits { min_tokens: before + 1, ..Limits::default() };
    assert!(write(&ids, 1, limits).0.concat().len() > "one two".len());
    let limits = Limits { stop_token_ids: vec![tail[1]], ..Limits::default() };
    let (_, ending, tokens) = write(&tail, 1, limits);
    assert_eq!((ending.stop_reason, tokens), (Some(json!(tail[1])), 2));
}

fn scan_all(stops: &[&str], is_included: bool, pieces: &[&str]) -> (String, Option<String>) {
    let strings = stops.iter().map(|stop| (*stop).to_owned()).collect();
    let mut scanner = StopStrings::new(strings, is_included);
    let mut text = String::new();
    for piece in pieces {
        let scanned = scanner.scan((*piece).to_owned());
        text.push_str(&scanned.text);
        if scanned.found.is_some() {
            return (text, scanned.found);
        }
    }
    text.push_str(&scanner.pass(""));
    (text, None)
}

#[test]
fn found_however_the_text_is_cut() {
    let text = "eins, zwei: Ende\u{1f600}\u{1f600}! mehr";
    let stop = "Ende\u{1f600}\u{1f600}!";
    let chars: Vec<char> = text.chars().collect();
    for size in 1..=chars.len() {
        let pieces: Vec<String> = chars.chunks(size).map(|c| c.iter().collect()).collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let found = Some(stop.to_owned());
        assert_eq!(scan_all(&[stop], false, &pieces), ("eins, zwei: ".into(), found.clone()));
        assert_eq!(scan_all(&[stop], true, &pieces), (format!("eins, zwei: {stop}"), found));
        assert_eq!(scan_all(&["nie"], false, &pieces), (text.to_owned(), None));
    }
}

#[test]
fn what_only_looked_like_one_comes_out_late_and_whole() {
    let mut scanner = StopStrings::new(vec!["aab".into()], false);
    let mut step = |piece: &str| scanner.scan(piece.to_owned()).text;
    assert_eq!((step("xa"), step("a"), step("a")), ("x".into(), String::new(), "a".into()));
    assert_eq!((step("c"), step("")), ("aac".into(), String::new()));
}

#[test]
fn the_first_place_wins_then_the_first_name() {
    assert_eq!(scan_all(&["later", "at"], false, &["see at later"]).1.as_deref(), Some("at"));
    assert_eq!(scan_all(&["ab", "abc"], false, &["xabc"]), ("x".into(), Some("ab".into())));
    assert_eq!(scan_all(&["abc", "ab"], true, &["xabc"]), ("xabc".into(), Some("abc".into())));
}

#[test]
fn pieces_that_do_not_count_pass() {
    let mut scanner = StopStrings::new(vec!["ab".into()], false);
    assert_eq!(scanner.scan("xa".into()).text, "x");
    assert_eq!(scanner.pass("b ab a"), "ab ab a");
    assert_eq!(scanner.scan("b".into()), Scanned { text: "b".into(), found: None });
}

fn call() -> NamedCall {
    let call = Call { name: "f".into(), arguments: "{\"a\": \"\"}".into() };
    NamedCall { index: 1, id: "call_1".into(), call }
}

#[test]
fn reasoning_and_calls_have_fields_of_their_own() {
    let wording = Wording::new(Api::Chat, "r", "m");
    let delta = |part: Part| -> Value {
        let mut out = String::new();
        wording.part(&part, &mut out);
        let event: Value =
            serde_json::from_str(out.trim().strip_prefix("data: ").unwrap()).unwrap();
        event["choices"][0]["delta"].clone()
    };
    let function = json!({"name": "f", "arguments": "{\"a\": \"\"}"});
    assert_eq!(delta(Part::Reasoning("a\n".into())), json!({"reasoning_content": "a\n"}));
    assert_eq!(delta(Part::Content("a\n".into())), json!({"content": "a\n"}));
    assert_eq!(
        delta(Part::Call(call())),
        json!({"tool_calls": [
            {"id": "call_1", "type": "function", "function": function, "index": 1}
        ]})
    );
    let whole = |message: Message| {
        let ending = Ending::plain("stop");
        wording.whole(&message, &ending, Usage::default())["choices"][0]["message"].clone()
    };
    let mut message = Message::default();
    assert_eq!(whole(message), json!({"role": "assistant", "content": ""}));
    message = Message { calls: vec![call()], ..Message::default() };
    assert_eq!(
        whole(message),
        json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_1", "type": "function", "function": function}
        ]})
    );
    message = Message { reasoning: "r".into(), content: "c".into(), calls: vec![] };
    assert_eq!(
        whole(message),
        json!({"role": "assistant", "content": "c", "reasoning_content": "r"})
    );
}

#[test]
fn every_event_is_json_of_its_own() {
    for api in [Api::Chat, Api::Completions] {
        let wording = Wording::new(api, "r", "a \"model\"}");
        let ending = Ending { reason: "stop".into(), stop_reason: Some(json!("x")) };
        let usage = Usage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: Some(1) };
        let mut out = String::new();
        wording.opening(&mut out);
        wording.piece("a\n\"b\"\u{2028}\u{1f600}", &mut out);
        wording.closing(&ending, Some(usage), &mut out);
        let events: Vec<&str> = out.split_terminator("\n\n").collect();
        let (done, events) = events.split_last().unwrap();
        assert_eq!(*done, "data: [DONE]");
        let events: Vec<Value> = events
            .iter()
            .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
            .collect();
        assert!(events.iter().all(|event| event["model"] == "a \"model\"}"));
        let pointer = if api == Api::Chat { "/choices/0/delta/content" } else { "/choices/0/text" };
        let text: String =
            events.iter().filter_map(|event| event.pointer(pointer)?.as_str()).collect();
        assert_eq!(text, "a\n\"b\"\u{2028}\u{1f600}");
        let last = events.last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"]["total_tokens"], 5);
        assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
        assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "stop");
    }
}
