//! Conversations that come back: what is known of them changes nothing of their tokens.

use std::path::Path;

use kvflash_core::text::{
    ChatRequest, ChatTemplate, Effort, Prompt, Rendered, Scan, TextModel, Tokenizer,
};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A change of a conversation before it is sent again.
#[derive(Debug, Clone)]
enum Turn {
    Say(String),
    /// It goes back to where it was so many messages ago.
    Forget(usize),
    /// A message is another one.
    Edit(prop::sample::Index, String),
    /// It begins with another message.
    Precede(String),
    /// The last message is to be continued.
    Continue,
}

fn text() -> impl Strategy<Value = String> {
    let words = [
        "hello world ",
        "def f(x):\n    return x\n",
        "</s>",
        "<s>",
        "\u{4f60}\u{597d}",
        "\u{1f600} \"quoted\" \\ \t",
        "12345 ",
        "\n\n\n",
    ];
    // Some are below and some above the size from which on messages are kept.
    prop::collection::vec((prop::sample::select(words.to_vec()), 1_usize..200), 0..6)
        .prop_map(|parts| parts.into_iter().map(|(word, times)| word.repeat(times)).collect())
}

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        6 => text().prop_map(Turn::Say),
        1 => (1_usize..4).prop_map(Turn::Forget),
        2 => (any::<prop::sample::Index>(), text()).prop_map(|(at, text)| Turn::Edit(at, text)),
        1 => text().prop_map(Turn::Precede),
        1 => Just(Turn::Continue),
    ]
}

fn message(at: usize, text: &str) -> Value {
    match at % 3 {
        0 => json!({"role": "user", "content": text}),
        1 => json!({"role": "assistant", "content": text}),
        _ => {
            json!({"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": "b"}]})
        }
    }
}

/// The body's request, and the same one that knows nothing of where its messages stand.
fn with_request<T>(
    messages: &[Value],
    continues: bool,
    check: impl FnOnce([ChatRequest<'_>; 2]) -> T,
) -> T {
    let body = json!({"model": "m", "messages": messages, "max_tokens": 1}).to_string();
    let scan = Scan::of(&body).expect("an object");
    let field = scan.fields.iter().find(|field| &*field.name == "messages").expect("messages");
    let start = field.place.start;
    let places = scan.messages.iter().flatten();
    let places: Vec<_> = places.map(|at| at.start - start..at.end - start).collect();
    let plain = ChatRequest {
        messages: Some(&body[field.place.clone()]),
        add_generation_prompt: Some(!continues),
        continue_final_message: Some(continues),
        ..ChatRequest::default()
    };
    check([ChatRequest { places: Some(&places), ..plain }, plain])
}

#[test]
fn known_conversations_have_the_tokens_of_new_ones() {
    let folder = Path::new("../../tests/vectors/tiny-llama");
    let load = |cache_bytes| TextModel::from_folder(folder, cache_bytes).expect("tiny-llama");
    let (roomy, cramped) = (load(64 << 20), load(512 << 10));
    let template = ChatTemplate::from_folder(folder);
    let template = template.expect("it loads").expect("a template");
    let tokenizer = Tokenizer::from_folder(folder, 0).expect("tiny-llama");
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(96));
    let result = runner.run(&prop::collection::vec(turn(), 1..16), |turns| {
        let mut messages = Vec::new();
        for (at, turn) in turns.into_iter().enumerate() {
            let mut continues = false;
            match turn {
                Turn::Say(text) => messages.push(message(at, &text)),
                Turn::Forget(count) => messages.truncate(messages.len().saturating_sub(count)),
                Turn::Edit(_, _) if messages.is_empty() => {}
                Turn::Edit(index, text) => {
                    let place = index.index(messages.len());
                    messages[place] = message(at, &text);
                }
                Turn::Precede(text) => messages.insert(0, message(at, &text)),
                Turn::Continue => {
                    continues = messages.last().is_some_and(|last| last["content"] != "");
                }
            }
            with_request(&messages, continues, |requests| {
                let wanted = template.render(&requests[1]);
                let Ok(Rendered::Text(text)) = wanted else {
                    prop_assert!(roomy.chat_tokens(&requests[0]).is_err(), "{:?}", wanted);
                    return Ok(());
                };
                let wanted = Prompt::Tokens(tokenizer.encode_uncached(&text, false).expect("ids"));
                for model in [&roomy, &cramped] {
                    for request in &requests {
                        let quick = Effort { is_quick: true, ..Effort::FULL };
                        let tried = model.chat_tokens_within(request, quick).expect("no error");
                        prop_assert!(tried == wanted || tried == Prompt::Costly);
                        prop_assert_eq!(&model.chat_tokens(request).expect("ids"), &wanted);
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    let (of_tokens, of_messages) = roomy.cache_stats();
    assert!(of_tokens.hits_total > 1_000 && of_messages.hits_total > 1_000, "{of_messages:?}");
    let (_, of_messages) = cramped.cache_stats();
    assert!(of_messages.held_bytes <= of_messages.capacity_bytes);
    assert!(of_messages.evictions_total > 0, "no pressure");
}

#[test]
fn a_long_conversation_is_tried_quickly_only_where_it_is_known() {
    let folder = Path::new("../../tests/vectors/tiny-llama");
    let model = TextModel::from_folder(folder, 64 << 20).expect("tiny-llama");
    let quick = Effort { is_quick: true, ..Effort::FULL };
    let mut messages: Vec<_> =
        (0..20).map(|at| message(at, &format!("{at} is new. ").repeat(500))).collect();
    let counted = |messages: &[Value]| {
        with_request(messages, false, |[request, _]| {
            let before = model.cache_stats().0.misses_total;
            let tried = model.chat_tokens_within(&request, quick).expect("no error");
            (tried, model.cache_stats().0.misses_total - before)
        })
    };
    assert_eq!(counted(&messages), (Prompt::Costly, 0), "nothing was rendered");
    let whole = with_request(&messages, false, |[request, _]| model.chat_tokens(&request));
    assert_eq!(counted(&messages), (whole.expect("ids"), 0));
    let (_, before) = model.cache_stats();
    messages.push(message(20, "and a little more"));
    assert!(matches!(counted(&messages).0, Prompt::Tokens(_)));
    let (_, after) = model.cache_stats();
    assert_eq!(after.hits_total - before.hits_total, 20, "no message was parsed again");
    let tools = format!("[{}]", "1,".repeat(20_000));
    let tried = with_request(&messages, false, |[request, _]| {
        let request = ChatRequest { tools: Some(&tools), ..request };
        model.chat_tokens_within(&request, quick)
    });
    assert_eq!(tried.expect("no error"), Prompt::Costly, "tools are parsed each time");
}
