//! Counters of policies, for the metrics.

/// One counter or gauge of a policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample<'a> {
    /// Name without the program's prefix; counters end in `_total`.
    pub name: &'a str,
    /// Label and its value; `("", "")` without a label.
    pub label: (&'a str, &'a str),
    /// The value.
    pub value: f64,
}

impl<'a> Sample<'a> {
    /// A sample without a label.
    pub const fn plain(name: &'a str, value: f64) -> Self {
        Self { name, label: ("", ""), value }
    }
}
