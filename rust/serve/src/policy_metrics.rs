//! Counters of policies and shadows, as metrics.

use std::collections::BTreeMap;
use std::fmt;

use kvflash_core::policy::{Sample, Settings};
use kvflash_core::select::Policies;

use crate::page::{Labels, Page, and, label};

/// Writes the name of the deciding policy, and what it and the shadows report at each scrape.
pub(super) fn write_policies(
    page: &mut Page<'_>,
    name: &str,
    policies: &Policies,
    settings: &Settings,
) -> fmt::Result {
    let help = "Constant 1; the labels give the policy that chooses workers and the source of its defaults";
    let info = and(&label("policy", name), "profile", settings.profile.name());
    page.gauges("policy_info", help, [(info, 1)])?;
    let origins = settings.origins.iter().map(|origin| {
        let source = origin.read_from.as_deref().unwrap_or("default");
        let labels = and(&label("name", origin.name), "source", source);
        (and(&labels, "value", &origin.value), 1)
    });
    let help = "Constant 1; the labels give a variable of the policies, its value and its source";
    page.gauges("policy_setting_info", help, origins)?;
    // A policy that appears twice in a strategy has one family of metrics.
    let mut by_name = BTreeMap::<String, (&str, BTreeMap<Labels, f64>)>::new();
    policies.samples(&mut |sample: Sample<'_>| {
        let labels = match sample.label {
            ("", _) => Labels::new(),
            (key, value) => vec![(key.to_owned().into(), value.to_owned())],
        };
        let (_, family) =
            by_name.entry(sample.name.to_owned()).or_insert_with(|| (sample.help, BTreeMap::new()));
        *family.entry(labels).or_default() += sample.value;
    });
    for (name, (help, family)) in by_name {
        match name.strip_suffix("_total") {
            Some(name) => page.counters(name, help, family)?,
            None => page.gauges(&name, help, family)?,
        }
    }
    Ok(())
}
