//! Parses queries in the form that nearly all clients use, without serde: a flat JSON object of one
//! list of integers and a few strings. A query consists mostly of its list, which this parses 64
//! characters at a time.
//!
//! Its results equal those of serde_json; everything else, including all errors, is left to
//! serde_json.

use super::request::{MAX_TOKEN_IDS, Query, Words, default_tenant};

/// Parses a body; `None` if it has another form.
pub(super) fn read(bytes: &[u8]) -> Option<Query> {
    let mut rest = Rest(bytes);
    let (mut token_ids, mut model_name, mut tenant_id) = (None, None, None);
    let (mut lora_name, mut cache_salt, mut additional_salt) = (None, None, None);
    rest.token(b'{')?;
    loop {
        let key = rest.string()?;
        rest.token(b':')?;
        if key == "token_ids" {
            if token_ids.replace(rest.list()?).is_some() {
                return None;
            }
        } else {
            let field = match key {
                "model_name" => &mut model_name,
                "tenant_id" => &mut tenant_id,
                "lora_name" => &mut lora_name,
                "cache_salt" => &mut cache_salt,
                "additional_salt" | "additionalsalt" => &mut additional_salt,
                _ => return None,
            };
            // Repeated fields are left to serde_json.
            if field.replace(rest.string()?.to_owned()).is_some() {
                return None;
            }
        }
        match rest.next()? {
            b',' => {}
            b'}' => break,
            _ => return None,
        }
    }
    rest.skip_space();
    if !rest.0.is_empty() {
        return None;
    }
    Some(Query {
        token_ids: Words(token_ids?),
        model_name: model_name?,
        tenant_id: tenant_id.unwrap_or_else(default_tenant),
        lora_name,
        cache_salt,
        additional_salt,
        ..Query::default()
    })
}

/// The rest of a body.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn skip_space(&mut self) {
        while let [b' ' | b'\n' | b'\r' | b'\t', rest @ ..] = self.0 {
            self.0 = rest;
        }
    }

    /// The next byte that is not a space.
    fn next(&mut self) -> Option<u8> {
        self.skip_space();
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn token(&mut self, wanted: u8) -> Option<()> {
        (self.next()? == wanted).then_some(())
    }

    /// A string without escapes.
    fn string(&mut self) -> Option<&'a str> {
        self.token(b'"')?;
        let (text, rest) = self.0.split_at_checked(memchr::memchr(b'"', self.0)?)?;
        self.0 = rest.get(1..)?;
        if text.iter().any(|byte| *byte == b'\\' || *byte < b' ') {
            return None;
        }
        std::str::from_utf8(text).ok()
    }

    fn list(&mut self) -> Option<Vec<u32>> {
        self.token(b'[')?;
        self.skip_space();
        if let [b']', rest @ ..] = self.0 {
            self.0 = rest;
            return Some(Vec::new());
        }
        // Allocating for short numbers would waste three times the memory for long ones: grow
        // instead.
        let mut out = Vec::with_capacity((self.0.len() / 16).min(MAX_TOKEN_IDS));
        loop {
            self.short_integers(&mut out);
            self.skip_space();
            out.push(self.integer()?);
            if out.len() > MAX_TOKEN_IDS {
                return None;
            }
            match self.next()? {
                b',' => {}
                b']' => return Some(out),
                _ => return None,
            }
        }
    }

    /// Integers of up to seven digits, each with a comma and at most one space after it, as long as
    /// there are any: nearly all of a list.
    fn short_integers(&mut self, out: &mut Vec<u32>) {
        while let Some(block) = self.0.first_chunk()
            && out.len() < MAX_TOKEN_IDS - BLOCK
        {
            // Of many numbers at once, so that none waits for the one before it.
            let mut others = others_in(block);
            let mut start = 0;
            while let Some(word) = block[start..].first_chunk() {
                let end = others.trailing_zeros() as usize;
                let count = end - start;
                let has_leading_zero = count > 1 && block[start] == b'0';
                if count == 0 || count > 7 || has_leading_zero || block[end] != b',' {
                    break;
                }
                out.push(number(count, u64::from_le_bytes(*word) ^ ZEROS) as u32);
                (others, start) = (others & (others - 1), end + 1);
                if block.get(start) == Some(&b' ') {
                    (others, start) = (others & (others - 1), start + 1);
                }
            }
            if start == 0 {
                return;
            }
            self.0 = &self.0[start..];
        }
    }

    fn integer(&mut self) -> Option<u32> {
        let has_leading_zero = matches!(self.0, [b'0', b'0'..=b'9', ..]);
        let (mut value, first) = self.eight_digits();
        if first == 0 || has_leading_zero {
            return None;
        }
        let mut count = first;
        while count == 8 {
            let (part, more) = self.eight_digits();
            value = value.checked_mul(TENS[more])?.checked_add(part)?;
            // A number of 16 digits may continue, a shorter one does not.
            count = more;
        }
        // A fraction or an exponent remains where the caller expects a comma.
        u32::try_from(value).ok()
    }

    /// Up to eight digits, and their number.
    fn eight_digits(&mut self) -> (u64, usize) {
        let word = match self.0.first_chunk::<8>() {
            Some(chunk) => u64::from_le_bytes(*chunk),
            None => {
                let mut chunk = [0; 8];
                chunk[..self.0.len()].copy_from_slice(self.0);
                u64::from_le_bytes(chunk)
            }
        };
        let digits = word ^ ZEROS;
        let count = (others_of(digits).trailing_zeros() / 8) as usize;
        if count == 0 {
            return (0, 0);
        }
        self.0 = &self.0[count..];
        (number(count, digits), count)
    }
}

/// Characters that are looked at together.
const BLOCK: usize = 64;
const ZEROS: u64 = u64::from_le_bytes([b'0'; 8]);

/// A bit for each character that is no digit.
#[inline(always)]
fn others_in(block: &[u8; BLOCK]) -> u64 {
    let (words, _) = block.as_chunks::<8>();
    let bits = words.iter().enumerate().map(|(at, word)| {
        let others = others_of(u64::from_le_bytes(*word) ^ ZEROS) >> 7;
        // The lowest bits of all bytes, side by side in the highest byte.
        (others.wrapping_mul(0x0102_0408_1020_4080) >> 56) << (8 * at)
    });
    bits.fold(0, |all, bits| all | bits)
}

/// The highest bit of each byte above 9.
#[inline(always)]
fn others_of(digits: u64) -> u64 {
    let sum = (digits & 0x7f7f_7f7f_7f7f_7f7f) + 0x7676_7676_7676_7676;
    (sum | digits) & 0x8080_8080_8080_8080
}

/// The number that the first `count` of these digits write; `count` is 1 to 8.
#[inline(always)]
fn number(count: usize, digits: u64) -> u64 {
    // Leading zeros, then pairs, pairs of pairs, and their sum.
    let digits = digits << (64 - 8 * count);
    let pairs = digits.wrapping_mul(10).wrapping_add(digits >> 8);
    let low = (pairs & 0x0000_00ff_0000_00ff).wrapping_mul(0x000f_4240_0000_0064);
    let high = ((pairs >> 16) & 0x0000_00ff_0000_00ff).wrapping_mul(0x0000_2710_0000_0001);
    low.wrapping_add(high) >> 32
}

/// Powers of ten, by exponent.
const TENS: [u64; 9] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(text: &str) -> Option<Vec<u32>> {
        let body = format!("{{\"token_ids\": {text}, \"model_name\": \"m\"}}");
        read(body.as_bytes()).map(|query| query.token_ids.0)
    }

    #[test]
    fn every_field_is_read() {
        let body =
            br#" {"tenant_id":"t","token_ids":[1 , 2],"lora_name" : "l","model_name":"Qwen/\u{e9}",
            "cache_salt":"s","additional_salt":""} "#;
        assert_eq!(read(body), None, "escapes");
        let body = String::from_utf8_lossy(body).replace("\\u{e9}", "\u{e9}");
        let wanted = Query {
            token_ids: Words(vec![1, 2]),
            model_name: "Qwen/\u{e9}".to_owned(),
            tenant_id: "t".to_owned(),
            lora_name: Some("l".to_owned()),
            cache_salt: Some("s".to_owned()),
            additional_salt: Some(String::new()),
            ..Query::default()
        };
        assert_eq!(read(body.as_bytes()), Some(wanted));
    }

    #[test]
    fn what_is_not_plain_is_left() {
        for body in [
            "",
            "{}",
            "[]",
            r#"{"token_ids":[1]}"#,
            r#"{"model_name":"m"}"#,
            r#"{"token_ids":[1],"model_name":"m"} x"#,
            r#"{"token_ids":[1],"model_name":"m","model_name":"m"}"#,
            r#"{"token_ids":[1],"token_ids":[1],"model_name":"m"}"#,
            r#"{"token_ids":[1],"model_name":"m","additionalsalt":"m","additional_salt":"m"}"#,
            r#"{"token_ids":[1],"model_name":"m",}"#,
            r#"{"token_ids":[1],"model_name":"m","other":"m"}"#,
            r#"{"token_ids":[1],"model_name":"m","tenant_id":null}"#,
            r#"{"token_ids":[1],"model_name":"m\n"}"#,
            "{\"token_ids\":[1],\"model_name\":\"m\n\"}",
            r#"{"token_ids":[1],"model_name":"m"#,
            r#"{"token_ids":"AQ==","model_name":"m"}"#,
            r#"{"token_ids":[1"#,
        ] {
            assert_eq!(read(body.as_bytes()), None, "{body}");
        }
        assert_eq!(read(b"{\"token_ids\":[1],\"model_name\":\"\xff\"}"), None);
        let texts = "[,1];[1,];[1 2];[1.0];[1e3];[01];[00];[-];[-0];[+1];[1]];[x];[1\u{e9}]";
        for text in texts.split(';') {
            assert_eq!(list(text), None, "{text}");
        }
    }

    #[test]
    fn integers_end_where_their_type_does() {
        assert_eq!(list("[0,4294967295]"), Some(vec![0, u32::MAX]));
        for text in ["[4294967296]", "[-1]", "[18446744073709551616]", "[100000000000000000000000]"]
        {
            assert_eq!(list(text), None, "{text}");
        }
        assert_eq!(list("[]"), Some(vec![]));
    }

    #[test]
    fn longer_lists_than_may_be_are_left() {
        let text = |count: usize| format!("[{}0]", "0,".repeat(count - 1));
        assert_eq!(list(&text(MAX_TOKEN_IDS)).map(|list| list.len()), Some(MAX_TOKEN_IDS));
        assert_eq!(list(&text(MAX_TOKEN_IDS + 1)), None);
    }

    /// Bodies similar to a query, so that many of them are valid.
    fn body() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            2 => "-?[0-9]{1,11}",
            4 => any::<u32>().prop_map(|number| number.to_string()),
            1 => any::<i64>().prop_map(|number| number.to_string()),
            1 => "[ -~]{0,3}",
        ];
        let space = prop_oneof![4 => Just(""), 1 => Just(" "), 1 => Just("\n\t")];
        let field = prop_oneof![
            6 => Just(""),
            1 => Just(r#","tenant_id":"t""#),
            1 => Just(r#","cache_salt":null"#),
            1 => Just(r#","lora_name":"l","cache_salt":"\u00e9""#),
            1 => Just(r#","lora_name":3"#),
        ];
        (prop::collection::vec((piece, space), 0..16), field).prop_map(|(pieces, field)| {
            let list = pieces.iter().map(|(piece, space)| format!("{space}{piece}{space}"));
            let list = list.collect::<Vec<_>>().join(",");
            format!(r#"{{"token_ids":[{list}],"model_name":"m"{field}}}"#)
        })
    }

    proptest! {
        #[test]
        fn what_is_read_serde_json_reads_to_the_same(body in body()) {
            if let Some(query) = read(body.as_bytes()) {
                prop_assert_eq!(query, serde_json::from_str(&body).unwrap());
            }
        }

        #[test]
        fn numbers_of_any_length_are_read(numbers in prop::collection::vec((any::<u32>(), 0..32_u32), 1..40)) {
            let wanted: Vec<u32> = numbers.iter().map(|(number, shift)| number >> shift).collect();
            prop_assert_eq!(list(&format!("{wanted:?}")), Some(wanted));
        }
    }
}
