//! Which fields and headers of a request reach an engine, and which headers of its response reach a
//! client.
//!
//! Fields that control an engine belong to its operator: with them a client could have an engine
//! read caches from the client's address, take another client's blocks, or choose its worker. They
//! are dropped from the requests of clients with a key, unless the key allows them.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use bytes::Bytes;
use serde_json::{Value, json};

use super::SaltSecret;
use crate::gateway::api::{Api, Row, Weight};
use crate::gateway::body::Body;
use crate::{Key, Pass, Reject};

pub(crate) static REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// Fields of bodies, by the permission that they need.
///
/// # Source
/// The request models of vLLM 0.32 and SGLang 0.5.23.
const FIELDS: [(&str, Pass); 20] = [
    ("kv_transfer_params", Pass::KvTransferParams),
    ("ec_transfer_params", Pass::KvTransferParams),
    ("disaggregated_params", Pass::KvTransferParams),
    ("kv_router_hint", Pass::KvTransferParams),
    ("session_params", Pass::KvTransferParams),
    ("bootstrap_host", Pass::Bootstrap),
    ("bootstrap_port", Pass::Bootstrap),
    ("bootstrap_room", Pass::Bootstrap),
    ("bootstrap_pair_key", Pass::Bootstrap),
    ("decode_tp_size", Pass::Bootstrap),
    ("encoder_urls", Pass::Bootstrap),
    ("num_items_assigned", Pass::Bootstrap),
    ("need_wait_for_mm_inputs", Pass::Bootstrap),
    ("http_worker_ipc", Pass::Bootstrap),
    ("disagg_prefill_dp_rank", Pass::DataParallelRank),
    ("data_parallel_rank", Pass::DataParallelRank),
    ("routed_dp_rank", Pass::DataParallelRank),
    ("priority", Pass::Priority),
    ("chat_template", Pass::ChatTemplate),
    ("nvext", Pass::Nvext),
];

/// Fields that may contain such fields again: their names there, at any depth.
const NESTED: [(&str, &[&str], Pass); 4] = [
    ("chat_template_kwargs", &["chat_template", "tokenize"], Pass::ChatTemplate),
    ("vllm_xargs", TRANSFER, Pass::KvTransferParams),
    ("extra_args", TRANSFER, Pass::KvTransferParams),
    ("sampling_params", TRANSFER, Pass::KvTransferParams),
];
const TRANSFER: &[&str] = &["kv_transfer_params", "ec_transfer_params"];

/// Fields that would name a request at engines: the names are generated here.
const IDS: [&str; 2] = ["request_id", "rid"];

/// Headers, by the permission that they need. Gateways' headers never pass without it either: see
/// [`TRAVELS`].
const HEADERS: [(&str, Pass); 12] = [
    ("x-data-parallel-rank", Pass::DataParallelRank),
    ("x-kvflash-priority", Pass::Priority),
    ("x-dynamo-request-priority", Pass::Priority),
    ("x-dynamo-request-strict-priority", Pass::Priority),
    ("x-gateway-destination-endpoint", Pass::GatewayHeaders),
    ("x-gateway-destination-endpoint-subset", Pass::GatewayHeaders),
    ("x-gateway-destination-endpoint-served", Pass::GatewayHeaders),
    ("x-prefiller-host-port", Pass::GatewayHeaders),
    ("x-encoder-hosts-ports", Pass::GatewayHeaders),
    ("x-worker-instance-id", Pass::GatewayHeaders),
    ("x-prefill-instance-id", Pass::GatewayHeaders),
    ("x-dp-rank", Pass::GatewayHeaders),
];

/// Headers of a client's request that engines receive.
const TRAVELS: [&str; 9] = [
    "accept",
    "accept-language",
    "anthropic-beta",
    "anthropic-version",
    "content-type",
    "user-agent",
    "traceparent",
    "tracestate",
    "baggage",
];

/// Headers of an engine's response that clients receive.
const RETURNS: [&str; 8] = [
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-length",
    "content-type",
    "retry-after",
    "vary",
];

/// Drops the request headers that the key's client may not set; `count` is called with the kinds.
pub(crate) fn clean_headers(
    key: &Key,
    headers: &mut HeaderMap,
    mut count: impl FnMut(&'static str),
) {
    for (name, pass) in HEADERS.iter().filter(|(_, pass)| !key.allow.contains(pass)) {
        if headers.remove(*name).is_some() {
            count(pass.name());
        }
    }
}

/// The body to send, if it differs: without fields that the key's client may not set, and with the salt
/// of a tenant with an isolated cache; `count` is called with the kinds of dropped fields.
///
/// # Errors
/// 403 for an API without a salt at engines; 400 for a salt that is not a string, a field that comes
/// twice, or one with too many values to be searched.
pub(crate) fn clean_body(
    key: &Key,
    row: Option<&Row>,
    body: &Body,
    salts: Option<&SaltSecret>,
    mut count: impl FnMut(&'static str),
) -> Result<Option<Bytes>, Reject> {
    let mut changes: Vec<(&str, Option<Value>)> = Vec::new();
    for (field, pass) in FIELDS.iter().filter(|(field, _)| body.has(field)) {
        if !key.allow.contains(pass) {
            changes.push((field, None));
            count(pass.name());
        }
    }
    for (field, names, pass) in NESTED.iter().filter(|(field, ..)| body.has(field)) {
        if !key.allow.contains(pass)
            && let Some(rest) = without(body, field, names)?
        {
            changes.push((field, Some(rest)));
            count(pass.name());
        }
    }
    for field in IDS.into_iter().filter(|field| body.has(field)) {
        changes.push((field, None));
        count("request_id");
    }
    if key.is_isolated
        && let Some(salt) = salt_of(key, row, body, salts)?
    {
        changes.push(("cache_salt", Some(json!(salt))));
    }
    Ok((!changes.is_empty()).then(|| body.with(&changes)))
}

/// The value of a field without these names, if it contains any.
fn without(body: &Body, field: &str, names: &[&str]) -> Result<Option<Value>, Reject> {
    body.check_values(|name| name == field)?;
    let Some(mut value) = body.value::<Value>(field)? else { return Ok(None) };
    Ok(drop_names(&mut value, names).then_some(value))
}

fn drop_names(value: &mut Value, names: &[&str]) -> bool {
    let mut is_changed = false;
    match value {
        Value::Object(fields) => {
            let count = fields.len();
            fields.retain(|name, _| !names.contains(&name.as_str()));
            is_changed = fields.len() < count;
            fields.values_mut().for_each(|value| is_changed |= drop_names(value, names));
        }
        Value::Array(items) => {
            items.iter_mut().for_each(|value| is_changed |= drop_names(value, names));
        }
        _ => {}
    }
    is_changed
}

/// The salt for a request of an isolated tenant; `None` if prefix caching is not involved.
fn salt_of(
    key: &Key,
    row: Option<&Row>,
    body: &Body,
    salts: Option<&SaltSecret>,
) -> Result<Option<String>, Reject> {
    let row = row.unwrap_or_else(|| Row::of_fields(body.has("messages")));
    if row.weight == Weight::Nothing {
        return Ok(None);
    }
    let refused = |what: String| Err(Reject::new(axum::http::StatusCode::FORBIDDEN, what));
    if !has_salt(row.api) {
        return refused(format!(
            "{}: engines take no cache_salt there, and the key {:?} shares no cache with other tenants \
             (isolate); use /v1/chat/completions, /v1/completions or /v1/responses",
            row.path, key.id
        ));
    }
    let Some(salts) = salts else {
        return refused(format!(
            "the key {:?} shares no cache with other tenants (isolate), and this server has no \
             --salt-secret-file",
            key.id
        ));
    };
    let own: Option<String> = body.value("cache_salt")?;
    let own = own.as_deref().filter(|own| !own.is_empty());
    Ok(Some(salts.salt(&key.tenant, own)))
}

/// Whether requests of this API have the field `cache_salt`.
///
/// # Source
/// The request models of vLLM 0.32 and SGLang 0.5.23.
fn has_salt(api: Api) -> bool {
    api != Api::Unmatched
}

/// The headers that an engine receives with a request of the key's client: only a few, with a
/// request name that was generated here.
pub(crate) fn engine_headers(key: &Key, headers: &HeaderMap, request_id: &str) -> HeaderMap {
    let travels = |name: &HeaderName| {
        key.allow.contains(&Pass::GatewayHeaders) || TRAVELS.contains(&name.as_str())
    };
    let known = headers.iter().filter(|(name, _)| travels(name));
    let mut out: HeaderMap = known.map(|(name, value)| (name.clone(), value.clone())).collect();
    if let Ok(id) = HeaderValue::try_from(request_id) {
        out.insert(REQUEST_ID_HEADER.clone(), id);
    }
    out
}

/// Drops details that a client with a key need not know from an engine's response.
pub(crate) fn clean_answer(headers: &mut HeaderMap) {
    let hidden: Vec<HeaderName> =
        headers.keys().filter(|name| !RETURNS.contains(&name.as_str())).cloned().collect();
    for name in hidden {
        headers.remove(name);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use super::super::tests::key;
    use super::*;
    use crate::gateway::api::ROWS;
    use crate::gateway::body::MAX_VALUES;
    use crate::{Caller, Role};

    fn cleaned(key: &Key, path: &str, body: &Value) -> (Value, Vec<&'static str>) {
        let mut kinds = Vec::new();
        let parsed = Body::parse(body.to_string().into()).unwrap();
        let secret = SaltSecret::of(b"0123456789abcdef");
        let salts = Some(&secret);
        let bytes =
            clean_body(key, Row::of(path), &parsed, salts, |kind| kinds.push(kind)).unwrap();
        let value = bytes.map(|bytes| serde_json::from_slice(&bytes).unwrap());
        (value.unwrap_or_else(|| body.clone()), kinds)
    }

    #[test]
    fn what_controls_an_engine_is_dropped_on_every_path() {
        let mut body = json!({ "model": "m", "messages": [], "chat_template_kwargs": {"x": 1} });
        let honest = body.clone();
        for (field, _) in FIELDS {
            body[field] = json!({ "a": 1 });
        }
        for field in IDS {
            body[field] = json!("mine");
        }
        body["chat_template_kwargs"] = json!({ "chat_template": "t", "x": 1, "tokenize": false });
        for row in ROWS.iter().filter(|row| row.weight != Weight::Sound) {
            let (value, kinds) = cleaned(&key("a"), row.path, &body);
            assert_eq!(value, honest, "{}", row.path);
            assert_eq!(kinds.len(), FIELDS.len() + IDS.len() + 1);
        }
        let operator = Caller::Known(Arc::new(Key { role: Role::Admin, ..key("a") }));
        for trusted in [Caller::Anonymous, operator] {
            assert!(trusted.client().is_none());
        }
        // Written with an escape it is the same name.
        let text = r#"{"model": "m", "kv_transfer\u005fparams": {}}"#;
        let parsed = Body::parse(text.into()).unwrap();
        let bytes = clean_body(&key("a"), None, &parsed, None, |_| ()).unwrap().unwrap();
        assert_eq!(bytes, &br#"{"model":"m"}"#[..]);
    }

    #[test]
    fn nested_transfer_parameters_are_dropped_and_the_rest_stays() {
        let body = json!({
            "sampling_params": [{ "n": 1, "extra_args": { "kv_transfer_params": {}, "y": 2 } }],
            "vllm_xargs": { "x": 1 },
        });
        let (value, kinds) = cleaned(&key("a"), "/inference/v1/generate", &body);
        assert_eq!(value["sampling_params"], json!([{ "n": 1, "extra_args": { "y": 2 } }]));
        assert_eq!(value["vllm_xargs"], json!({ "x": 1 }));
        assert_eq!(kinds, ["kv_transfer_params"]);
    }

    #[test]
    fn a_field_with_millions_of_values_is_not_searched() {
        for (field, ..) in NESTED {
            let list = |values: usize| format!("[{}0]", "0,".repeat(values));
            let cleaned = |values: usize| {
                // Whatever it is called: a picture weighs nothing in a prompt.
                let text = format!(r#"{{"{field}": {{"image": {}}}}}"#, list(values));
                let parsed = Body::parse(text.into()).unwrap();
                clean_body(&key("a"), None, &parsed, None, |_| ())
            };
            assert!(cleaned(MAX_VALUES - 3).unwrap().is_none());
            let reject = cleaned(MAX_VALUES - 2).unwrap_err();
            let wanted =
                format!("{field}: it has {} values, more than {MAX_VALUES}", MAX_VALUES + 1);
            assert!(reject.message.starts_with(&wanted), "{}", reject.message);
            assert_eq!((reject.status.as_u16(), reject.param.as_deref()), (400, Some(field)));
        }
    }

    #[test]
    fn a_key_allows_what_it_names() {
        let allow = vec![Pass::Priority, Pass::ChatTemplate];
        let some = Key { allow, ..key("a") };
        let body = json!({ "priority": 1, "chat_template": "t", "nvext": {}, "rid": "r" });
        let (value, kinds) = cleaned(&some, "/v1/chat/completions", &body);
        assert_eq!(value, json!({ "priority": 1, "chat_template": "t" }));
        assert_eq!(kinds, ["nvext", "request_id"]);
    }

    #[test]
    fn headers_go_by_lists() {
        let mut headers = HeaderMap::new();
        for (name, _) in HEADERS {
            headers.insert(name, HeaderValue::from_static("1"));
        }
        for name in ["accept", "cookie", "x-request-id"] {
            headers.insert(name, HeaderValue::from_static("client"));
        }
        let none = key("a");
        let mut kinds = Vec::new();
        clean_headers(&none, &mut headers.clone(), |kind| kinds.push(kind));
        assert_eq!(kinds.len(), HEADERS.len());
        let out = engine_headers(&none, &headers, "kvf-1");
        let mut names: Vec<&str> = out.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["accept", "x-request-id"]);
        assert_eq!(out["x-request-id"], "kvf-1");
        let gateway = Key { allow: vec![Pass::GatewayHeaders], ..key("a") };
        let mut left = headers.clone();
        clean_headers(&gateway, &mut left, |_| ());
        let out = engine_headers(&gateway, &left, "kvf-1");
        assert!(out.contains_key("cookie") && out.contains_key("x-gateway-destination-endpoint"));
        assert!(!out.contains_key("x-kvflash-priority"));
        assert_eq!(out["x-request-id"], "kvf-1");
        let mut answer: HeaderMap = ["content-type", "set-cookie", "x-request-id", "alt-svc"]
            .map(|name| (HeaderName::from_static(name), HeaderValue::from_static("1")))
            .into_iter()
            .collect();
        clean_answer(&mut answer);
        assert_eq!(answer.keys().collect::<Vec<_>>(), ["content-type"]);
    }

    #[test]
    fn an_isolated_tenant_gets_a_salt_where_engines_take_one_and_is_refused_elsewhere() {
        let isolated = |id| Key { is_isolated: true, ..key(id) };
        let body = json!({ "model": "m" });
        let secret = SaltSecret::of(b"0123456789abcdef");
        for row in &ROWS {
            let parsed = match row.weight {
                Weight::Sound => Body::opaque("--x".into()),
                _ => Body::parse(body.to_string().into()).unwrap(),
            };
            let found = clean_body(&isolated("a"), Some(row), &parsed, Some(&secret), |_| ());
            match (row.weight, has_salt(row.api)) {
                (Weight::Nothing, _) => assert_eq!(found.unwrap(), None, "{}", row.path),
                (_, true) => {
                    let value: Value = serde_json::from_slice(&found.unwrap().unwrap()).unwrap();
                    assert_eq!(value["cache_salt"], secret.salt("a", None), "{}", row.path);
                }
                (_, false) => {
                    let reject = found.unwrap_err();
                    assert_eq!(reject.status.as_u16(), 403, "{}", row.path);
                    assert!(reject.message.contains("no cache_salt"), "{}", reject.message);
                }
            }
        }
        // The correct salt of another tenant is a different salt within this tenant.
        let stolen = json!({ "model": "m", "cache_salt": secret.salt("b", None) });
        let (own, _) = cleaned(&isolated("a"), "/v1/completions", &stolen);
        assert_ne!(own["cache_salt"], stolen["cache_salt"]);
        let parsed = Body::parse(body.to_string().into()).unwrap();
        let reject = clean_body(&isolated("a"), None, &parsed, None, |_| ()).unwrap_err();
        assert!(reject.message.contains("--salt-secret-file"), "{}", reject.message);
        for bad in [
            r#"{"cache_salt": ["a"]}"#,
            r#"{"cache_salt": "a", "cache_salt": "b"}"#,
            // An engine may read the first one.
            r#"{"vllm_xargs": {"kv_transfer_params": {}}, "vllm_xargs": {}}"#,
        ] {
            let bad = Body::parse(bad.into()).unwrap();
            let reject = clean_body(&isolated("a"), None, &bad, Some(&secret), |_| ()).unwrap_err();
            assert_eq!(reject.status.as_u16(), 400);
        }
    }
}
