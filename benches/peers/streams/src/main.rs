//! `streams engines FIRST_PORT COUNT INTERVAL_US` and `streams load URL STREAMS TOKENS`.
//!
//! An engine answers a chat with `max_tokens` events, one each interval (0 = as fast as they are
//! taken), numbered from 0. The client checks that each stream has all of them in order, once.

mod engines;
mod load;

#[tokio::main]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["engines", first, count, interval_us] => {
            engines::serve(number(first) as u16, number(count) as u16, number(interval_us)).await;
        }
        ["load", url, streams, tokens] => {
            load::run(url, number(streams) as usize, number(tokens) as usize).await;
        }
        _ => {
            panic!("streams engines FIRST_PORT COUNT INTERVAL_US | streams load URL STREAMS TOKENS")
        }
    }
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("{text:?} is not a number"))
}
