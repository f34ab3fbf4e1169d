//! Texts on which two tokenizers of the same model would part.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokenizers::{AddedToken, Tokenizer as Reference};

/// How many added tokens are tried: the first ones are those that templates use.
const ADDED_TOKENS_MAX: usize = 48;

/// Texts of vocabulary entries in random order, and the entries in each.
const GLUED_TEXTS: usize = 300;
const GLUED_ENTRIES: usize = 20;

/// Texts of [`ATOMS`] in random order, and how many atoms each has.
const MIXED_TEXTS: usize = 300;
const MIXED_ATOMS: usize = 32;

/// One in so many characters of Unicode's first plane, and of all others.
const CHARACTER_STEP: usize = 11;
const LATER_CHARACTER_STEP: usize = 509;

/// What patterns of pre-tokenizers tell apart, and what normalizers change: spaces, letters, digits, marks,
/// others, and longer ones of all kinds.
const ATOMS: [&[&str]; 6] = [
    &[
        " ", "  ", "   ", "\t", "\n", "\n\n", "\r", "\r\n", "\u{b}", "\u{c}", "\u{85}", "\u{a0}",
        "\u{1680}", "\u{2003}", "\u{2028}", "\u{202f}", "\u{3000}", "\u{180e}", "\u{200b}",
        "\u{feff}",
    ],
    &[
        "a", "Z", "the", "\u{e9}", "e\u{301}", "\u{df}", "\u{1c5}", "\u{2b0}", "\u{212a}",
        "\u{fb01}", "\u{d55c}",
    ],
    &["0", "12", "345", "6789", "\u{664}", "\u{bd}", "\u{2167}", "\u{b2}"],
    &[
        "'", "'s", "'S", "'ll", "'LL", "'re", "'\u{17f}", ".", ",", "!?", "...", "--", "/", "//",
        "_", "(", "){", "\u{3002}", "\u{ff0c}", "\u{bf}", "$", "\u{20ac}", "+=", "\u{2192}", "^",
    ],
    &[
        "\u{0}", "\u{1b}", "\u{7f}", "\u{ad}", "\u{fffd}", "\u{fffe}", "\u{e000}", "\\ud83d", "<|",
        "|>", "<s>", "</s>", "\u{2581}", "\u{120}", "\u{10a}",
    ],
    &[
        "HTTPServer",
        "camelCase",
        "\u{430}\u{411}",
        "\u{3b1}\u{3a9}",
        "\u{5d0}\u{5b8}",
        "\u{627}\u{64e}",
        "\u{915}\u{94d}\u{937}",
        "\u{e01}\u{e33}",
        "\u{4f60}\u{597d}",
        "\u{3072}\u{304c}",
        "\u{30ab}\u{3099}",
        "\u{1112}\u{1161}\u{11ab}",
        "\u{20000}",
        "\u{1d7d8}",
        "\u{2019}t",
        "\u{1f600}",
        "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}",
        "\u{1f1e9}\u{1f1ea}",
        "\u{1f44d}\u{1f3fd}",
        "\u{2764}\u{fe0f}",
        "\u{10ffff}",
    ],
];

const PASSAGES: &[&str] = &[
    "It's 12,345 o'clock, don't you know?\n\n\tCaf\u{e9}  na\u{ef}ve \u{4f60}\u{597d} (x_y) = \
     f(2);\r\n  THEY'LL go -- now... \u{1f600} e\u{301}tude\u{a0}and so\n",
    "def f(x: int = 0) -> list[int]:\n    \"\"\"Doc.\"\"\"\n    return [x**2 for _ in range(10)]  # 3.14\n\n\n",
    "fn main() {\n\tlet x = &mut v[..n]; // it's\n\tprintln!(\"{:?}\", x::<u8>());\n}\r\n\r\n",
    "{\"a\": [1, -2.5e10, true, null], \"\\u00e9\": \"https://example.com/a?b=c&d=%20#e\"}\n",
    "| a | b |\n|---|:-:|\n| **x** | `y` |\n\n# Title\n\n* one\n  * two\n\n> q\n",
    "SELECT * FROM t WHERE a<>'b' AND c>=10;\n$ ls -la /usr/lib | grep '^d' 2>&1\n",
    "\u{4eca}\u{5929}\u{5929}\u{6c14}\u{5f88}\u{597d}\u{ff0c}\u{6211}\u{4eec}\u{53bb}\u{516c}\u{56ed}\u{5427}\u{3002}\n\
     \u{3053}\u{308c}\u{306f}\u{30c6}\u{30b9}\u{30c8}\u{3067}\u{3059}\u{3002}\u{d55c}\u{ad6d}\u{c5b4} \u{d14d}\u{c2a4}\u{d2b8}.\n",
    "\u{41f}\u{440}\u{438}\u{432}\u{435}\u{442}, \u{43c}\u{438}\u{440}! \u{645}\u{631}\u{62d}\u{628}\u{627} \
     \u{628}\u{643}\u{645}. \u{928}\u{92e}\u{938}\u{94d}\u{924}\u{947} \u{5e9}\u{5dc}\u{5d5}\u{5dd}\n",
];

/// The texts, the same ones at every load of a tokenizer: some 150,000 characters.
///
/// # Cost
/// Decodes six thousand ids.
pub(super) fn hard_texts(reference: &Reference, added: &[(u32, AddedToken)]) -> Vec<String> {
    let mut random = SmallRng::seed_from_u64(20);
    let mut texts: Vec<String> = PASSAGES.iter().map(|&text| text.to_owned()).collect();
    texts.extend(runs());
    texts.extend(long_words(&mut random));
    texts.extend(characters());
    texts.extend(glued(reference, &mut random));
    let atoms = ATOMS.concat();
    texts.extend((0..MIXED_TEXTS).map(|_| {
        let mixed = (0..MIXED_ATOMS).map(|_| atoms[random.random_range(0..atoms.len())]);
        mixed.collect::<String>()
    }));
    texts.extend(around_tokens(added, &mut random));
    texts
}

/// The same character many times, between others.
fn runs() -> impl Iterator<Item = String> {
    let repeated =
        [" ", "\n", "\t", "\r\n", " \n", "\n ", "\u{a0}", "\u{3000}", "a", "9", ".", "=", "-", "'"];
    repeated.into_iter().flat_map(|unit| {
        [2, 3, 4, 7, 16, 33, 64, 300].into_iter().flat_map(move |count| {
            let run = unit.repeat(count);
            [format!("x{run}y"), format!("{run}.{run}7"), format!("\u{4f60}{run}\n")]
        })
    })
}

fn long_words(random: &mut SmallRng) -> Vec<String> {
    let mut word = |alphabet: &[u8], length: usize| {
        let letters = (0..length).map(|_| alphabet[random.random_range(0..alphabet.len())] as char);
        letters.collect::<String>()
    };
    let lower = b"abcdefghijklmnopqrstuvwxyz";
    let mut texts = vec![
        word(lower, 4_000),
        word(b"ab", 1_000),
        word(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", 2_000),
        word(b"0123456789abcdef", 1_000),
        word(b"0123456789", 500),
        word(b"!#$%&*+,-./:;<=>?@^_`|~", 1_000),
    ];
    texts.extend(
        (10..20).map(|length| (0..80).map(|_| word(lower, length)).collect::<Vec<_>>().join(" ")),
    );
    texts
}

/// Characters of every category of Unicode, after letters and spaces, thirty a text.
fn characters() -> Vec<String> {
    let first = (0..0x1_0000).step_by(CHARACTER_STEP);
    let later = (0x1_0000..0x11_0000).step_by(LATER_CHARACTER_STEP);
    let all: Vec<char> = (0..0x300).chain(first).chain(later).filter_map(char::from_u32).collect();
    let text = |few: &[char]| few.iter().flat_map(|&one| ['a', one, ' ', one]).collect();
    all.chunks(30).map(text).collect()
}

/// Entries of the vocabulary in random order.
fn glued(reference: &Reference, random: &mut SmallRng) -> Vec<String> {
    let size = reference.get_vocab_size(true) as u32;
    if size == 0 {
        return Vec::new();
    }
    let mut texts = Vec::with_capacity(GLUED_TEXTS);
    for _ in 0..GLUED_TEXTS {
        let ids: Vec<u32> = (0..GLUED_ENTRIES).map(|_| random.random_range(0..size)).collect();
        // A decoder that fails on ids in no order says nothing about encoding.
        texts.extend(reference.decode(&ids, false));
    }
    texts
}

/// Added tokens among words, whitespace and each other.
fn around_tokens(added: &[(u32, AddedToken)], random: &mut SmallRng) -> Vec<String> {
    let flagged = |token: &AddedToken| token.lstrip || token.rstrip || token.normalized;
    let few = added.iter().take(ADDED_TOKENS_MAX);
    let odd = added.iter().skip(ADDED_TOKENS_MAX).filter(|(_, token)| flagged(token));
    let mut texts = Vec::new();
    for (_, token) in few.chain(odd.take(ADDED_TOKENS_MAX)) {
        let token = &token.content;
        texts.push(format!("{token}user\nHi there {token} {token}{token}\n\nyes{token}"));
        texts.push(format!(" a {token}\u{4f60} b\n{token}\n"));
        // Cut short at either end it is text.
        let half = token.chars().take(token.chars().count() / 2).collect::<String>();
        texts.push(format!("{half} {half}{token}{half}\n"));
        if !added.is_empty() {
            let other = &added[random.random_range(0..added.len())].1.content;
            texts.push(format!("x{token}{other} \u{301}{other}  {token}1"));
        }
    }
    texts
}
