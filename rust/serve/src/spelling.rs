//! The known name that was probably meant by one that is not known.

/// A name with so many wrong letters is taken for another one.
const MAX_TYPOS: usize = 2;

/// The known name that differs from `name` by no more than two letters.
///
/// # Cost
/// None for a name that is longer than all that are known.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = known.into_iter().filter(|other| name.len().abs_diff(other.len()) <= MAX_TYPOS);
    let counted = near.map(|other| (typos(name.as_bytes(), other.as_bytes()), other));
    counted.filter(|(count, _)| *count <= MAX_TYPOS).min().map(|(_, other)| other)
}

/// Letters to add, drop or change until one is the other.
fn typos(one: &[u8], other: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (at, a) in one.iter().enumerate() {
        let mut before = at;
        row[0] = at + 1;
        for (to, b) in other.iter().enumerate() {
            let changed = before + usize::from(a != b);
            before = row[to + 1];
            row[to + 1] = changed.min(before + 1).min(row[to] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_two_letters_away_at_most() {
        let known = ["hermes", "mistral", "llama3_json"];
        for (name, wanted) in [
            ("herms", Some("hermes")),
            ("Mistral", Some("mistral")),
            ("llama3-json", Some("llama3_json")),
            ("llama3", None),
            ("", None),
        ] {
            assert_eq!(nearest(name, known), wanted, "{name}");
        }
    }
}
