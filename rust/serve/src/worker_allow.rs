//! Allowed addresses of workers that are added over HTTP.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use axum::http::{StatusCode, Uri};
use ipnet::IpNet;
use kvflash_core::error::Result;

use crate::Reject;
use crate::lock::nets;

const FLAG: &str = "--worker-allow";

/// Time limit for resolving a name.
const LOOK_UP_TIME: Duration = Duration::from_secs(2);

/// A cloud's metadata service with an address that is not link-local.
const METADATA_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0x0254);

/// Whether an address is one of the link's only, which no worker has and a cloud's metadata service does.
fn is_link_local(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local() || address == METADATA_V6,
    }
}

/// Allowed addresses of workers that are added over HTTP; by default all except link-local ones.
#[derive(Debug, Clone, Default)]
pub(crate) struct WorkerAllow {
    nets: Vec<IpNet>,
}

impl WorkerAllow {
    /// # Errors
    /// `Config`, naming the flag and what came.
    pub fn parse(text: &str) -> Result<Self> {
        Ok(Self { nets: nets(FLAG, text)? })
    }

    /// Checks that a worker may have this URL.
    ///
    /// # Errors
    /// 403, naming the field, the address and the flag; 400 for an invalid URL.
    pub async fn check_url(&self, field: &str, url: &str) -> std::result::Result<(), Reject> {
        let uri = url.parse::<Uri>().ok();
        let host = uri.as_ref().and_then(Uri::host);
        let host = host.ok_or_else(|| {
            Reject::bad_request(format!(
                "{field} must be http://host:port or https://host:port, got {url:?}"
            ))
        })?;
        self.check_host(field, host).await
    }

    /// Checks that a worker may publish at this ZMQ address.
    ///
    /// # Errors
    /// 400 for another transport; 403, naming the field, the address and the flag.
    pub async fn check_socket(
        &self,
        field: &str,
        address: &str,
    ) -> std::result::Result<(), Reject> {
        let Some(place) = address.strip_prefix("tcp://") else {
            let what = format!(
                "{field} must be tcp://host:port for a worker that is added over HTTP, got {address:?}: other \
                 sockets are only for flags and discovery"
            );
            return Err(Reject::bad_request(what));
        };
        let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
        // ZMQ also accepts `source;target`.
        self.check_host(field, host.rsplit(';').next().unwrap_or(host)).await
    }

    async fn check_host(&self, field: &str, host: &str) -> std::result::Result<(), Reject> {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        // The zone of a link-local address.
        let bare = bare.split('%').next().unwrap_or(bare);
        // The engines' notation for binding; connected to as this machine.
        let bare = if bare == "*" { "127.0.0.1" } else { bare };
        if let Ok(address) = bare.parse::<IpAddr>() {
            return self.check_address(field, address);
        }
        let found = tokio::time::timeout(LOOK_UP_TIME, tokio::net::lookup_host((bare, 0))).await;
        match found {
            Ok(Ok(addresses)) => {
                addresses.into_iter().try_for_each(|one| self.check_address(field, one.ip()))
            }
            // It may appear later, and is resolved again for every connection.
            _ if self.nets.is_empty() => Ok(()),
            _ => {
                let what = format!(
                    "{field}: {bare:?} cannot be resolved, so it can't be checked against {FLAG}; \
                     give an IP address, or a name that this host resolves"
                );
                Err(Reject::new(StatusCode::FORBIDDEN, what))
            }
        }
    }

    fn check_address(&self, field: &str, address: IpAddr) -> std::result::Result<(), Reject> {
        match self.objection(address) {
            None => Ok(()),
            Some(why) => Err(Reject::new(StatusCode::FORBIDDEN, format!("{field}: {why}"))),
        }
    }

    /// Why no worker may be at this address, in words; `None` where one may.
    pub fn objection(&self, address: IpAddr) -> Option<String> {
        let address = address.to_canonical();
        if is_link_local(address) {
            Some(format!("{address} is link-local, which is not allowed for workers"))
        } else if !self.nets.is_empty() && !self.nets.iter().any(|net| net.contains(&address)) {
            Some(format!("{address} is not among the addresses of {FLAG}"))
        } else {
            None
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn workers_are_where_they_may_be() {
        let any = WorkerAllow::default();
        let some = WorkerAllow::parse("10.0.0.0/8, ::1").unwrap();
        for (allow, url, wanted) in [
            (&any, "http://10.1.2.3:8000", None),
            (&any, "http://127.0.0.1:8000/prefix", None),
            (&any, "http://169.254.169.254/latest", Some("link-local")),
            (&any, "http://[fe80::1]:80", Some("link-local")),
            (&any, "http://[fd00:ec2::254]", Some("link-local")),
            (&any, "http://[::ffff:169.254.169.254]", Some("link-local")),
            // 169.254.169.254 as a single number, which the system resolves.
            (&any, "http://2852039166:80", Some("link-local")),
            (&any, "http://no-such-name.invalid:80", None),
            (&any, "/x", Some("must be http://host:port")),
            (&some, "http://10.1.2.3:8000", None),
            (&some, "http://[::1]:8000", None),
            (&some, "http://127.0.0.1:8000", Some("not among the addresses of --worker-allow")),
            (&some, "http://no-such-name.invalid:80", Some("cannot be resolved")),
        ] {
            let refused = allow.check_url("url", url).await.err().map(|reject| reject.message);
            match wanted {
                None => assert_eq!(refused, None, "{url}"),
                Some(text) => assert!(
                    refused.clone().unwrap_or_default().contains(text),
                    "{url}: {refused:?}"
                ),
            }
        }
        for (address, is_legal) in [
            ("tcp://10.0.0.1:5557", true),
            ("tcp://[::1]:5557", true),
            ("tcp://*:5557", true),
            ("tcp://169.254.1.1:5557", false),
            ("tcp://eth0;169.254.1.1:5557", false),
            ("ipc:///tmp/x", false),
            ("inproc://x", false),
            ("udp://10.0.0.1:1", false),
        ] {
            assert_eq!(any.check_socket("events", address).await.is_ok(), is_legal, "{address}");
        }
        assert!(WorkerAllow::parse("ten").unwrap_err().to_string().contains("--worker-allow"));
    }
}
