//! Uploads in parts (`multipart/form-data`): reads the one field that routing needs.

use axum::http::{HeaderMap, header};
use bytes::Bytes;
use memchr::memmem;

use crate::Reject;

/// Size limit of a part's head, in bytes.
const MAX_PART_HEAD_BYTES: usize = 4_096;

/// The field `model` of an upload with these headers.
///
/// # Errors
/// 400 for a body without parts, or a model that is not a string.
pub(super) fn model<'a>(headers: &HeaderMap, body: &'a [u8]) -> Result<Option<&'a str>, Reject> {
    Ok(find_model(headers, body)?.map(|(name, _)| name))
}

/// Whether the beginning of an upload names its model.
pub(super) fn names_model(headers: &HeaderMap, beginning: &[u8]) -> bool {
    matches!(find_model(headers, beginning), Ok(Some((_, true))))
}

/// The field `model`, and whether its end was found.
fn find_model<'a>(headers: &HeaderMap, body: &'a [u8]) -> Result<Option<(&'a str, bool)>, Reject> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let Some(boundary) = kind.and_then(boundary) else {
        let got = kind.unwrap_or("none");
        return Err(Reject::bad_request(format!(
            "content-type: must be multipart/form-data with a boundary, got {got:?}"
        )));
    };
    let boundary = format!("--{boundary}");
    // Data before the first boundary, and the line that ends it, belong to no part.
    let starts = memmem::find_iter(body, boundary.as_bytes()).map(|at| at + boundary.len());
    for start in starts {
        let part = &body[start..];
        let head = &part[..part.len().min(MAX_PART_HEAD_BYTES)];
        let Some(end) = memmem::find(head, b"\r\n\r\n") else { continue };
        if name_of(&part[..end]) != Some("model") {
            continue;
        }
        let value = &part[end + 4..];
        let end = memmem::find(value, b"\r\n");
        return match std::str::from_utf8(&value[..end.unwrap_or(value.len())]) {
            Ok(name) => Ok(Some((name, end.is_some()))),
            Err(_) => Err(Reject::bad_request("model: must be UTF-8 text")),
        };
    }
    Ok(None)
}

/// The upload with its model `name`, found by [`model`], replaced.
pub(super) fn with_model(body: &Bytes, name: &str, model: &str) -> Bytes {
    let at = name.as_ptr() as usize - body.as_ptr() as usize;
    let parts = [&body[..at], model.as_bytes(), &body[at + name.len()..]];
    parts.concat().into()
}

/// The boundary in a content type.
fn boundary(kind: &str) -> Option<&str> {
    let mut parts = kind.split(';').map(str::trim);
    parts.next().filter(|kind| kind.eq_ignore_ascii_case("multipart/form-data"))?;
    let value = parts.find_map(|part| {
        let (name, value) = part.split_once('=')?;
        name.eq_ignore_ascii_case("boundary").then_some(value.trim_matches('"'))
    });
    value.filter(|boundary| !boundary.is_empty())
}

/// The name in a part's `Content-Disposition`.
fn name_of(head: &[u8]) -> Option<&str> {
    let head = std::str::from_utf8(head).ok()?;
    let line = head.split("\r\n").find(|line| {
        let name = line.split(':').next().unwrap_or_default();
        name.eq_ignore_ascii_case("content-disposition")
    })?;
    line.split(';').find_map(|part| Some(part.trim().strip_prefix("name=")?.trim_matches('"')))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn model_of(kind: &str, body: &str) -> Result<Option<String>, String> {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, kind.parse().unwrap());
        let found = model(&headers, body.as_bytes());
        found.map(|name| name.map(str::to_owned)).map_err(|reject| reject.message)
    }

    const BODY: &str = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"model\"\r\n\
        Content-Type: audio/wav\r\n\r\n\u{0}RIFF--\r\n--b\r\n\
        content-disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--b--\r\n";

    #[test]
    fn the_model_is_found_whatever_stands_before_it() {
        for kind in
            ["multipart/form-data; boundary=b", "Multipart/Form-Data; charset=x; boundary=\"b\""]
        {
            assert_eq!(model_of(kind, BODY).unwrap().as_deref(), Some("whisper"));
        }
        let body = Bytes::from_static(BODY.as_bytes());
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, "multipart/form-data; boundary=b".parse().unwrap());
        let name = model(&headers, &body).unwrap().unwrap();
        assert_eq!(with_model(&body, name, "turbo"), BODY.replace("whisper", "turbo"));
        let none = "--b\r\ncontent-disposition: form-data; name=\"file\"\r\n\r\nmodel\r\n--b--";
        assert_eq!(model_of("multipart/form-data; boundary=b", none).unwrap(), None);
        assert_eq!(model_of("multipart/form-data; boundary=b", "--b").unwrap(), None);
    }

    #[test]
    fn what_has_no_parts_is_refused() {
        for kind in ["application/json", "multipart/form-data", "multipart/form-data; boundary="] {
            assert!(model_of(kind, BODY).unwrap_err().contains("content-type: must be"), "{kind}");
        }
    }
}
