//! Validation of clients' names: models, tenants, endpoints.

use super::cache_groups::EngineFacts;
use super::identity::Identity;
use super::model::ModelKey;
use crate::error::{Error, Result};

/// Longest name of a model, tenant or adapter, and longest salt of an index, in bytes.
pub const MAX_NAME_BYTES: usize = 1_024;
/// Longest host of an endpoint, in bytes: that of a name in DNS.
const MAX_HOST_BYTES: usize = 255;
/// A refused endpoint is quoted up to this length, in characters.
const MAX_QUOTED_CHARS: usize = 80;

/// Checks the names of a model and its tenant.
///
/// # Errors
/// `InvalidArgument`: names the field and the limit.
pub(super) fn check_names(key: &ModelKey) -> Result<()> {
    if key.model_name.is_empty() {
        return Err(Error::invalid("model_name must not be empty"));
    }
    if key.tenant_id.is_empty() {
        return Err(Error::invalid("tenant_id must not be empty: leave it out for \"default\""));
    }
    check_length("model_name", &key.model_name)?;
    check_length("tenant_id", &key.tenant_id)
}

/// Checks an adapter and a salt that hold for a whole index.
///
/// # Errors
/// `InvalidArgument`: names the field and the limit.
pub(super) fn check_identity(identity: &Identity) -> Result<()> {
    let Identity { lora_name, cache_salt } = identity;
    check_length("lora_name", lora_name.as_deref().unwrap_or_default())?;
    check_length("additional_salt", cache_salt.as_deref().unwrap_or_default())
}

fn check_length(field: &str, name: &str) -> Result<()> {
    if name.len() > MAX_NAME_BYTES {
        return Err(Error::invalid(format!(
            "{field} may have at most {MAX_NAME_BYTES} bytes, got {}",
            name.len()
        )));
    }
    Ok(())
}

/// Whether an endpoint is in a broker's stream, which may be registered twice: by the reader of the
/// stream, and through discovery.
pub(super) fn is_brokered(endpoint: &str) -> bool {
    ["nats://", "jetstream://"].iter().any(|scheme| endpoint.starts_with(scheme))
}

/// Checks that an event endpoint is a socket: events over a broker arrive another way.
///
/// # Errors
/// `InvalidArgument`: names the field and says what is legal.
pub fn check_is_socket(field: &str, endpoint: &str) -> Result<()> {
    if is_brokered(endpoint) { Err(no_socket(field, endpoint)) } else { Ok(()) }
}

/// Checks an operator's data about an engine; `block_size` is that of its registration.
///
/// # Errors
/// `InvalidArgument`: names the field, the limit and what came.
pub(super) fn check_facts(facts: &EngineFacts, block_size: Option<u32>) -> Result<()> {
    if facts.attention_chunk_size == Some(0) {
        return Err(Error::invalid("attention_chunk_size must be at least 1 token, got 0"));
    }
    let Some(chunk) = facts.offload_chunk else { return Ok(()) };
    let size = block_size.unwrap_or(1);
    if chunk == 0 || !chunk.is_multiple_of(size) {
        return Err(Error::invalid(format!(
            "offload_chunk must be a multiple of block_size, which is {size} tokens, got {chunk}"
        )));
    }
    Ok(())
}

fn no_socket(field: &str, endpoint: &str) -> Error {
    Error::invalid(format!(
        "{field} must be tcp://host:port or ipc://path, got {}",
        quoted(endpoint)
    ))
}

/// Checks an event endpoint: `tcp://host:port`, `ipc://path` or the `inproc://name` of an index in this process, or a broker's
/// `nats://subject` or `jetstream://stream/worker/rank`.
///
/// # Errors
/// `InvalidArgument`: names the field and says what is legal.
pub(super) fn check_endpoint(field: &str, endpoint: &str) -> Result<()> {
    let got = || quoted(endpoint);
    match endpoint.split_once("://") {
        Some(("tcp", address)) => {
            let Some((host, port)) = address.rsplit_once(':').filter(|(host, _)| !host.is_empty())
            else {
                return Err(no_socket(field, endpoint));
            };
            if !host.bytes().all(|byte| byte.is_ascii_graphic() && byte != b',') {
                return Err(Error::invalid(format!(
                    "{field} must be tcp://host:port with one host, of ASCII characters without spaces and \
                     commas, got {}",
                    got()
                )));
            }
            if host.len() > MAX_HOST_BYTES {
                return Err(Error::invalid(format!(
                    "{field} must be tcp://host:port with a host of at most {MAX_HOST_BYTES} bytes, got {} bytes: \
                     {}",
                    host.len(),
                    got()
                )));
            }
            if port != "*" && port.parse::<u16>().is_err() {
                return Err(Error::invalid(format!(
                    "{field} must be tcp://host:port with a port in 0..=65535, got {}",
                    got()
                )));
            }
            Ok(())
        }
        Some(("ipc" | "inproc" | "nats" | "jetstream", path))
            if !path.is_empty() && !path.contains(char::is_control) =>
        {
            Ok(())
        }
        _ => Err(no_socket(field, endpoint)),
    }
}

/// A client's text as quoted in a refusal.
fn quoted(text: &str) -> String {
    match text.char_indices().nth(MAX_QUOTED_CHARS) {
        None => format!("{text:?}"),
        Some((at, _)) => format!("{:?}... ({} bytes)", &text[..at], text.len()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_follow_the_published_rules() {
        for good in [
            "tcp://*:5558",
            "tcp://127.0.0.1:0",
            "inproc://x",
            "ipc:///tmp/a.sock",
            "tcp://[::1]:5557",
            "nats://namespace-a-component-b-kv-events",
            "jetstream://namespace-a-component-b-kv-events/1/0",
        ] {
            assert_eq!(check_endpoint("endpoint", good), Ok(()));
        }
        for bad in [
            "tcp://host",
            "tcp://:5558",
            "udp://host:5558",
            "not-an-endpoint",
            "nats://",
            "tcp://host:99999",
            "",
        ] {
            let error = check_endpoint("endpoint", bad).unwrap_err().to_string();
            assert!(error.starts_with("endpoint must be"), "{error}");
        }
        for (bad, wanted) in [
            ("tcp://a b:5", r#"without spaces and commas, got "tcp://a b:5""#),
            ("tcp://h:1,tcp://h:2", r#"with one host, of ASCII"#),
            ("tcp://h:1 2=tcp://h:2", r#"with one host, of ASCII"#),
            ("tcp://h\n:5", r#"got "tcp://h\n:5""#),
            ("tcp://é:5", r#"got "tcp://é:5""#),
            ("ipc:///tmp/a\n", r#"got "ipc:///tmp/a\n""#),
            ("tcp://h:70000", r#"with a port in 0..=65535, got "tcp://h:70000""#),
            ("tcp://h:", r#"with a port in 0..=65535, got "tcp://h:""#),
        ] {
            let error = check_endpoint("endpoint", bad).unwrap_err().to_string();
            assert!(error.starts_with("endpoint must be") && error.contains(wanted), "{error}");
        }
        let host = |bytes| format!("tcp://{}:5", "a".repeat(bytes));
        assert_eq!(check_endpoint("endpoint", &host(MAX_HOST_BYTES)), Ok(()));
        let error = check_endpoint("endpoint", &host(5_000)).unwrap_err().to_string();
        assert!(error.contains("at most 255 bytes, got 5000 bytes: \"tcp://aaa"), "{error}");
        assert!(error.len() < 250, "{error}");
    }

    #[test]
    fn a_model_and_its_tenant_have_a_name() {
        let key = |model: &str, tenant: &str| ModelKey {
            model_name: model.into(),
            tenant_id: tenant.into(),
        };
        assert_eq!(check_names(&key("m", "default")), Ok(()));
        for (key, wanted) in [(key("", "t"), "model_name"), (key("m", ""), "tenant_id")] {
            let error = check_names(&key).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{wanted} must not be empty")), "{error}");
        }
    }

    #[test]
    fn names_of_adapters_and_salts_have_the_limit_of_other_names() {
        let of = |bytes: usize| Some("a".repeat(bytes));
        let identity = |lora_name, cache_salt| Identity { lora_name, cache_salt };
        assert_eq!(check_identity(&identity(of(MAX_NAME_BYTES), of(MAX_NAME_BYTES))), Ok(()));
        assert_eq!(check_identity(&Identity::default()), Ok(()));
        for (long, field) in [
            (identity(of(1_025), None), "lora_name"),
            (identity(None, of(1_025)), "additional_salt"),
        ] {
            let error = check_identity(&long).unwrap_err().to_string();
            assert_eq!(error, format!("{field} may have at most 1024 bytes, got 1025"));
        }
    }
}
