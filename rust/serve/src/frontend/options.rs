//! Options of the frontend.

use std::ops::Deref;
use std::str::FromStr;

use kvflash_core::error::{Error, Result};

use crate::gateway::turn::FairnessOptions;
use crate::metrics::check_prefix;
use crate::{FrontendSettings, Http, RoutingOptions};

/// Whether a request may be answered without a prefill worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EnforceDisagg {
    /// Yes: if no prefill worker is available, the decode worker does everything.
    #[default]
    Off,
    /// Yes, until its model has had a prefill worker; then no.
    UntilFirstPrefill,
    /// No.
    Always,
}

impl FromStr for EnforceDisagg {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "off" => Ok(Self::Off),
            "until-first-prefill" => Ok(Self::UntilFirstPrefill),
            "always" => Ok(Self::Always),
            other => Err(Error::Config(format!(
                "--enforce-disagg must be off, until-first-prefill or always, got {other:?}"
            ))),
        }
    }
}

/// Options of a frontend; those in `own` are accessible as if they were here.
#[derive(Debug, Clone, Default)]
pub struct FrontendOptions {
    /// Settings that only a frontend has: limits and timeouts, its tokenizer.
    pub own: FrontendSettings,
    /// How requests are routed.
    pub routing: RoutingOptions,
    /// How clients take turns; `None`: first come, first served.
    pub fairness: Option<FairnessOptions>,
    /// Whether events over a broker are received.
    pub has_broker_events: bool,
    /// Whether requests may be answered without a prefill worker.
    pub enforce_disagg: EnforceDisagg,
    /// Where workers are expected from, for responses before any have joined.
    pub waits_for: String,
    /// Limits of its connections and bodies.
    pub http: Http,
}

impl Deref for FrontendOptions {
    type Target = FrontendSettings;

    fn deref(&self) -> &FrontendSettings {
        &self.own
    }
}

impl FrontendOptions {
    /// The key for the frontend's own calls to workers.
    ///
    /// # Errors
    /// `Config` if it is given twice, or its file is unreadable or empty.
    pub(super) fn api_key(&self) -> Result<Option<String>> {
        let Some(path) = &self.worker_api_key_file else { return Ok(self.worker_api_key.clone()) };
        let wrong =
            |why: String| Error::Config(format!("--worker-api-key-file {}: {why}", path.display()));
        if self.worker_api_key.is_some() {
            return Err(wrong("--worker-api-key is given as well; use one of them".to_owned()));
        }
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        match text.trim() {
            "" => Err(wrong("the file is empty".to_owned())),
            key => Ok(Some(key.to_owned())),
        }
    }

    /// Checks what the types can't express.
    ///
    /// # Errors
    /// `Config`, naming the flag.
    pub fn check(&self) -> Result<()> {
        check_prefix(&self.metrics_prefix)?;
        self.routing.check()?;
        self.fairness.as_ref().map_or(Ok(()), FairnessOptions::check)?;
        for (flag, value) in [
            ("--max-body-bytes", self.max_body_bytes),
            ("--max-upload-bytes", self.max_upload_bytes),
            ("--max-concurrent-requests", self.max_concurrent_requests),
            ("--max-workers", self.max_workers),
            ("--max-attempts", self.max_attempts),
        ] {
            if value == 0 {
                return Err(Error::Config(format!("{flag} must be at least 1, got 0")));
            }
        }
        for (flag, value) in [
            ("--connect-timeout", self.connect_timeout),
            ("--first-byte-timeout", self.first_byte_timeout),
            ("--stream-idle-timeout", self.stream_idle_timeout),
            ("--tokenize-timeout", self.tokenize_timeout),
            ("--health-interval", self.health_interval),
        ] {
            if value.is_zero() {
                return Err(Error::Config(format!("{flag} must be longer than 0")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_key_for_workers_comes_from_a_file_or_a_flag() {
        let path = std::env::temp_dir().join(format!("kvflash-key-{}", std::process::id()));
        let mut options = FrontendOptions::default();
        assert_eq!(options.api_key().unwrap(), None);
        options.own.worker_api_key_file = Some(path.clone());
        let mut fails_with = |text: Option<&str>, key: Option<&str>| {
            text.into_iter().for_each(|text| std::fs::write(&path, text).unwrap());
            options.own.worker_api_key = key.map(str::to_owned);
            options.api_key().map_err(|error| error.to_string())
        };
        assert!(fails_with(None, None).unwrap_err().contains("No such file"));
        assert!(fails_with(Some(" \n"), None).unwrap_err().contains("the file is empty"));
        assert_eq!(fails_with(Some("secret\n"), None).unwrap().as_deref(), Some("secret"));
        let twice = fails_with(None, Some("other")).unwrap_err();
        assert!(twice.contains("use one of them") && !twice.contains("other"), "{twice}");
    }
}
