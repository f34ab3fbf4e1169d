//! Stop strings in a text that comes in pieces.

/// Finds the first stop string, wherever the pieces are cut, and holds back what may become one.
#[derive(Debug)]
pub(super) struct StopStrings {
    strings: Vec<String>,
    /// Include what was found in the text.
    is_included: bool,
    /// Not given out: the longest end of the text with which a stop string begins.
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Scanned {
    /// Text that may be given out now.
    pub text: String,
    /// The stop string that was found; the text is over.
    pub found: Option<String>,
}

impl StopStrings {
    pub fn new(strings: Vec<String>, is_included: bool) -> Self {
        Self { strings, is_included, held: String::new() }
    }

    /// Take a piece of text in which stop strings count.
    ///
    /// # Cost
    /// O(bytes of the piece and of the longest stop string, times their number).
    pub fn scan(&mut self, piece: String) -> Scanned {
        if self.strings.is_empty() || (piece.is_empty() && self.held.is_empty()) {
            return Scanned { text: piece, found: None };
        }
        let mut text = std::mem::take(&mut self.held);
        text.push_str(&piece);
        // The first one counts; of two at one place the one that was named first.
        let hits = self.strings.iter().filter_map(|stop| Some((text.find(stop.as_str())?, stop)));
        if let Some((at, stop)) = hits.min_by_key(|(at, _)| *at) {
            let found = Some(stop.clone());
            text.truncate(if self.is_included { at + stop.len() } else { at });
            return Scanned { text, found };
        }
        let from = self.begin_of_one(&text);
        self.held = text.split_off(from);
        Scanned { text, found: None }
    }

    /// Take a piece in which they do not count yet; all of it may be given out.
    pub fn pass(&mut self, piece: &str) -> String {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        text
    }

    /// What is held back, at the end of the text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Where the longest end of `text` starts that begins a stop string.
    fn begin_of_one(&self, text: &str) -> usize {
        let longest = self.strings.iter().map(String::len).max().unwrap_or(0);
        let from = text.len().saturating_sub(longest.saturating_sub(1));
        (from..text.len())
            .filter(|at| text.is_char_boundary(*at))
            .find(|at| self.strings.iter().any(|stop| stop.starts_with(&text[*at..])))
            .unwrap_or(text.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(stops: &[&str], is_included: bool, pieces: &[&str]) -> (String, Option<String>) {
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
        text.push_str(&scanner.finish());
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
            assert_eq!(all(&[stop], false, &pieces), ("eins, zwei: ".into(), found.clone()));
            assert_eq!(all(&[stop], true, &pieces), (format!("eins, zwei: {stop}"), found));
            assert_eq!(all(&["nie"], false, &pieces), (text.to_owned(), None));
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
        assert_eq!(all(&["later", "at"], false, &["see at later"]).1.as_deref(), Some("at"));
        assert_eq!(all(&["ab", "abc"], false, &["xabc"]), ("x".into(), Some("ab".into())));
        assert_eq!(all(&["abc", "ab"], true, &["xabc"]), ("xabc".into(), Some("abc".into())));
    }

    #[test]
    fn pieces_that_do_not_count_pass() {
        let mut scanner = StopStrings::new(vec!["ab".into()], false);
        assert_eq!(scanner.scan("xa".into()).text, "x");
        assert_eq!(scanner.pass("b ab a"), "ab ab a");
        assert_eq!(scanner.scan("b".into()), Scanned { text: "b".into(), found: None });
    }
}
