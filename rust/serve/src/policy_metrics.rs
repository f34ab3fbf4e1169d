//! Counters of policies and shadows, as metrics.

use std::collections::BTreeMap;
use std::fmt;

use kvflash_core::policy::{Sample, Settings};
use kvflash_core::select::Policies;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder};
use prometheus_client::metrics::MetricType;

type Labels = Vec<(String, String)>;

/// Reads the policies at each scrape.
#[derive(Debug)]
pub(super) struct PolicyMetrics {
    pub name: String,
    pub policies: Policies,
    pub settings: Settings,
}

impl PolicyMetrics {
    fn samples(&self) -> BTreeMap<String, Vec<(Labels, f64)>> {
        let mut by_name: BTreeMap<String, Vec<(Labels, f64)>> = BTreeMap::new();
        let mut note = |sample: Sample<'_>| {
            let (label, value) = sample.label;
            let labels = if label.is_empty() {
                Vec::new()
            } else {
                vec![(label.to_owned(), value.to_owned())]
            };
            let family = by_name.entry(sample.name.to_owned()).or_default();
            // A policy that appears twice in a strategy has one family of metrics.
            match family.iter_mut().find(|(known, _)| *known == labels) {
                Some((_, sum)) => *sum += sample.value,
                None => family.push((labels, sample.value)),
            }
        };
        self.policies.samples(&mut note);
        by_name
    }

    fn info(&self) -> Labels {
        let profile = self.settings.profile.name().to_owned();
        vec![("policy".to_owned(), self.name.clone()), ("profile".to_owned(), profile)]
    }
}

impl PolicyMetrics {
    fn encode_settings(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help =
            "Constant 1; the labels give a variable of the policies, its value and its source";
        let mut settings =
            encoder.encode_descriptor("policy_setting_info", help, None, MetricType::Gauge)?;
        for origin in &self.settings.origins {
            let source = origin.read_from.as_deref().unwrap_or("default");
            let labels = [("name", origin.name), ("source", source), ("value", &*origin.value)];
            settings.encode_family(&labels)?.encode_gauge(&1_i64)?;
        }
        Ok(())
    }
}

impl Collector for PolicyMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "Constant 1; the labels give the policy that chooses workers and the source of its defaults";
        encoder
            .encode_descriptor("policy_info", help, None, MetricType::Gauge)?
            .encode_family(&self.info())?
            .encode_gauge(&1_i64)?;
        self.encode_settings(&mut encoder)?;
        for (name, family) in self.samples() {
            let (name, kind) = match name.strip_suffix("_total") {
                Some(name) => (name, MetricType::Counter),
                None => (name.as_str(), MetricType::Gauge),
            };
            let mut metric =
                encoder.encode_descriptor(name, "Reported by a routing policy", None, kind)?;
            for (labels, value) in family {
                if labels.is_empty() {
                    encode(&mut metric, kind, value)?;
                } else {
                    encode(&mut metric.encode_family(&labels)?, kind, value)?;
                }
            }
        }
        Ok(())
    }
}

fn encode(one: &mut MetricEncoder<'_>, kind: MetricType, value: f64) -> Result<(), fmt::Error> {
    match kind {
        MetricType::Counter => one.encode_counter::<Labels, f64, f64>(&value, None),
        _ => one.encode_gauge(&value),
    }
}
