//! The operator's settings of the services, except for routing.

use std::path::PathBuf;
use std::time::Duration;

use kvflash_core::select::{ClusterSettings, IndexSettings, routing_table};
use kvflash_core::settings;
use kvflash_core::settings::{Concern, Legal, Setting};

use crate::metrics::PREFIX;

settings! {
    /// Settings of every service's log.
    LogSettings { "Server and log": {
        /// error, warn, info, debug or trace
        ///
        /// debug logs a line for each decision
        log_level: String = "info".to_owned(), &["error", "warn", "info", "debug", "trace"],
            "--log-level LEVEL";
        /// Format of log lines
        log_format: String = "text".to_owned(), &["text", "json"], "--log-format";
    } }
}

settings! {
    /// Where a frontend or an indexer finds its workers. The core uses none of these.
    FleetSettings { "Workers": {
        /// Engine URLs; dns+http://NAME stands for every address that NAME resolves to
        ///
        /// Takes one or several values, and may be repeated. For an indexer, see [engines without
        /// registration](indexer.md#engines-without-registration)
        workers: Vec<String> = Vec::new(), (),
            "--worker URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,role=ROLE][,dp=N]";
        /// Time between DNS lookups of dns+http:// workers
        ///
        /// See [engines found by DNS](frontend.md#engines-found-by-dns)
        worker_dns_interval_secs: Duration = Duration::from_secs(5), 0.1..=3_600.0,
            "--worker-dns-interval-secs SECONDS";
        /// Name server for these lookups, instead of those in /etc/resolv.conf
        worker_dns_server: Option<String> = None, (), "--worker-dns-server ADDRESS[:PORT]";
        /// Where to find workers; file unless you set --worker
        discovery: Option<String> = None, &["mem", "file", "etcd", "none"],
            "--discovery --store-kv DYN_STORE_KV";
        /// Use only the workers of this discovery namespace
        namespace: Option<String> = None, (), "--namespace NAME DYN_NAMESPACE";
    } }
}

settings! {
    /// Settings of frontends only.
    FrontendSettings { "Server and log": {
        /// Address to listen on
        ///
        /// `KVFLASH_HTTP_HOST` takes precedence over `KVFLASH_HOST`, which is also the address at which
        /// others reach this process
        host: String = "0.0.0.0".to_owned(), (), "--host --http-host ADDRESS DYN_HTTP_HOST";
        /// Port to listen on; 0 picks a free one
        port: u16 = 8000, 0..=65_535, "--port --http-port DYN_HTTP_PORT";
        /// Threads that serve HTTP
        threads: usize = 2, 1..=1_024, "--threads";
        /// Prefix of the names in /metrics, without the underscore
        metrics_prefix: String = PREFIX.to_owned(), (), "--metrics-prefix PREFIX DYN_METRICS_PREFIX";
    }
    "Models": {
        /// A name that clients may use for a model, or for several by weight
        ///
        /// May be repeated. See [aliases](frontend.md#aliases)
        model_alias: Vec<String> = Vec::new(), (),
            "--model-alias NAME=MODEL[:WEIGHT][,MODEL:WEIGHT]";
    }
    "Disaggregation": {
        /// Engines that only prefill; a decode engine of the same model generates the answer
        ///
        /// See [disaggregated serving](disaggregation.md)
        prefill_workers: Vec<String> = Vec::new(), (),
            "--prefill-worker URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,dp=N]";
        /// Engines that decode what prefill engines hand over; without a prefill engine they do both
        ///
        /// See [disaggregated serving](disaggregation.md)
        decode_workers: Vec<String> = Vec::new(), (),
            "--decode-worker URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,dp=N]";
        /// Refuse requests that no prefill worker can take
        enforce_disagg: String = "off".to_owned(),
            Legal::Mode(&["off", "until-first-prefill", "always"], "always"),
            "--enforce-disagg DYN_ENFORCE_DISAGG";
    }
    "Tokens": {
        /// Folder with tokenizer.json, or a model in the local Hub cache; for one model or for all
        ///
        /// The folder also provides the chat template. `MODEL=FOLDER` applies to that model only; may be
        /// repeated. Without this flag a model uses the tokenizer in its workers' cards; if they have none, the
        /// engines tokenize. See [tokenizers](frontend.md#a-tokenizer-for-each-model)
        tokenizer: Vec<String> = Vec::new(), (), "--tokenizer [MODEL=]FOLDER";
        /// Memory to cache the tokens of text seen before, and chat messages
        ///
        /// Three quarters are for tokens. The cache drops the least recently used entries
        tokenizer_cache: usize = 256 * 1024 * 1024, Legal::Bytes(1, false), "--tokenizer-cache --text-cache-bytes SIZE";
        /// Format of reasoning in the output of runtime workers that return tokens; unset: left in content
        ///
        /// The parser moves reasoning from the content to `reasoning_content`. A parser named in a worker's card
        /// takes precedence. The frontend refuses an unknown name and lists the known ones. See
        /// [reasoning and tool calls](runtime.md#reasoning-and-tool-calls)
        reasoning_parser: Option<String> = None, (), "--reasoning-parser NAME";
        /// Format of tool calls in their output: hermes, llama3_json or mistral; unset: left in content
        ///
        /// Applies to requests with `tools`. A parser named in a worker's card takes precedence. See
        /// [reasoning and tool calls](runtime.md#reasoning-and-tool-calls)
        tool_call_parser: Option<String> = None, (), "--tool-call-parser NAME";
        /// Time between comparisons of kvflash's tokens with the engines'; 0: never compare
        ///
        /// See [the same tokens as the engine's](frontend.md#the-same-tokens-as-the-engines)
        parity_interval: Duration = Duration::from_secs(3_600), 0.0..=31_536_000.0,
            "--parity-interval SECONDS";
        /// Send prompts as token ids to engines that accept them, so that they need not tokenize again
        ///
        /// kvflash checks this with each engine when the engine starts, and sends only prompts this way for
        /// which its tokens are known to equal the engine's. See [tokenized once](frontend.md#tokenized-once)
        send_token_ids: bool = true, (), "--send-token-ids --no-send-token-ids";
        /// Memory for token ids that engines return for chats without a tokenizer; 0: request none
        ///
        /// Without a tokenizer and without an engine's own `/tokenize`, kvflash sends chats with
        /// `return_token_ids` and matches each turn by the ids of the previous one. It drops the least recently
        /// used conversations. See
        /// [taught by answers](frontend.md#taught-by-answers)
        taught_cache: usize = 64 * 1024 * 1024, Legal::Bytes(1, true), "--taught-cache SIZE";
        /// API key for calls to workers; better kept in a file or in the environment
        ///
        /// Used for health, models and `/tokenize`, and for requests of clients that have a key of --keys-file;
        /// other clients' requests carry their own key. kvflash does not send it to workers added over HTTP: see
        /// [workers that somebody adds](security.md#workers-that-somebody-adds)
        worker_api_key: Option<String> = None, (), "--worker-api-key KEY";
        /// File with the key of --worker-api-key, so that no process list shows it
        worker_api_key_file: Option<PathBuf> = None, (), "--worker-api-key-file FILE";
    }
    "Access": {
        /// File with the secret from which kvflash derives the cache salts of isolated tenants
        ///
        /// Must be the same on every replica; see [tenants](tenants.md#isolation)
        salt_secret_file: Option<PathBuf> = None, (), "--salt-secret-file FILE";
        /// Send clients with keys the headers that name the worker and its overlap
        ///
        /// Clients without keys get these headers anyway
        expose_overlap: bool = false, (), "--expose-overlap";
    }
    "Limits and timeouts": {
        /// Longest prompt; longer ones are refused with 400. 0: 16 bytes per token of the model's limit
        ///
        /// Counts bytes of text, not of images; a number or token id counts as 8 bytes. The model's limit is the
        /// smallest `max_model_len` of its workers. While that is unknown, prompts are limited to 4MiB
        max_prompt_bytes: usize = 0, Legal::Bytes(1, true), "--max-prompt-bytes SIZE";
        /// Largest request body; larger ones are refused with 413
        max_body_bytes: usize = 32 * 1024 * 1024, Legal::Bytes(1, false), "--max-body-bytes SIZE";
        /// Largest audio upload; larger ones are refused with 413
        ///
        /// Applies to `/v1/audio/transcriptions` and `/v1/audio/translations`
        max_upload_bytes: usize = 32 * 1024 * 1024, Legal::Bytes(1, false), "--max-upload-bytes SIZE";
        /// Maximum requests in flight; more are refused with 429
        max_concurrent_requests: usize = 4_096, 1..=10_000_000, "--max-concurrent-requests";
        /// Answer /ready with 503 after requests in flight have been at their maximum for 10 s
        ///
        /// For load balancers that have other replicas with room. Off by default, because under overload all
        /// replicas would leave at once
        ready_fails_when_full: bool = false, (), "--ready-fails-when-full";
        /// Maximum number of workers
        max_workers: usize = 4_096, 1..=65_535, "--max-workers";
        /// Maximum workers to try for a request before the first byte of its answer
        max_attempts: usize = 5, 1..=1_000, "--max-attempts";
        /// Longest time to connect to a worker
        connect_timeout: Duration = Duration::from_secs(2), 0.001..=86_400.0,
            "--connect-timeout SECONDS";
        /// Longest time from a request to the first byte of the worker's answer
        ///
        /// Each attempt has its own limit
        first_byte_timeout: Duration = Duration::from_secs(600), 0.001..=86_400.0,
            "--first-byte-timeout SECONDS";
        /// Longest pause within a worker's answer
        ///
        /// After a longer pause the frontend cuts the answer off
        stream_idle_timeout: Duration = Duration::from_secs(300), 0.001..=86_400.0,
            "--stream-idle-timeout SECONDS";
        /// Longest time for an engine's /tokenize
        tokenize_timeout: Duration = Duration::from_secs(2), 0.001..=86_400.0,
            "--tokenize-timeout SECONDS";
        /// Time between health checks of a worker
        ///
        /// For an unhealthy worker 0.25 s at first, then twice as long each time, up to this value
        health_interval: Duration = Duration::from_secs(2), 0.001..=86_400.0,
            "--health-interval SECONDS";
        /// Time for running requests to finish after --lame-duck-timeout
        ///
        /// A second SIGTERM stops the process at once
        drain_timeout: Duration = Duration::from_secs(30), 0.0..=86_400.0, "--drain-timeout SECONDS";
    }
    "Compatibility": {
        /// Accepted for compatibility; has no effect
        request_plane: Option<String> = None, &["tcp", "http", "nats"],
            "--request-plane DYN_REQUEST_PLANE";
    } }
}

settings! {
    /// How clients of a frontend take turns.
    FairnessSettings { "Fairness between clients": {
        /// Queue requests; the next turn goes to the client that was served the fewest tokens
        ///
        /// See [the fair queue](policies.md#the-fair-queue)
        fairness: String = "none".to_owned(), &["none", "vtc-fair", "vtc-max-fair", "vtc-pred"],
            "--fairness";
        /// The identity of a client: authorization, user or header:NAME
        ///
        /// `authorization` uses the client's `Authorization`, then the header or field `user`, then its address.
        /// `user` uses the name that clients give themselves, `header:NAME` a header that a gateway sets. A client
        /// with a [key](tenants.md#fair-turns) is identified by its key
        fairness_identity: String = "authorization".to_owned(), (), "--fairness-identity IDENTITY";
        /// Clients with a larger (above 1) or smaller (below 1) share
        fairness_weight: Vec<(String, f64)> = Vec::new(), (), "--fairness-weight CLIENT=WEIGHT,...";
        /// Maximum queued requests per client; more are refused with 429
        fairness_queue_limit: usize = 1_024, 1..=10_000_000, "--fairness-queue-limit";
        /// Longest wait for a turn before a request is refused with 503
        fairness_queue_timeout: Duration = Duration::from_secs(60), 0.001..=86_400.0,
            "--fairness-queue-timeout SECONDS";
        /// Maximum running requests per healthy worker; further requests wait
        fairness_max_running: usize = 256, 1..=10_000_000, "--fairness-max-running";
        /// Price of a cached prompt token, as a share of an uncached one's
        fairness_cached_share: f64 = 0.0, 0.0..=1.0, "--fairness-cached-share";
    } }
}

settings! {
    /// Settings of standalone routers only.
    RouterSettings { "Server and log": {
        /// Address to listen on
        ///
        /// `KVFLASH_HTTP_HOST` takes precedence over `KVFLASH_HOST`, which is also the address at which
        /// others reach this process
        host: String = "0.0.0.0".to_owned(), (), "--host --http-host ADDRESS";
        /// Port to listen on; 0 picks a free one
        port: u16 = 8091, 0..=65_535, "--port --http-port";
        /// Threads that serve HTTP
        threads: usize = 2, 1..=1_024, "--threads";
        /// Prefix of the names in /metrics, without the underscore
        metrics_prefix: String = PREFIX.to_owned(), (), "--metrics-prefix PREFIX DYN_METRICS_PREFIX";
    }
    "Workers": {
        /// Route to the workers of this endpoint, found through discovery
        ///
        /// Exactly three parts; see [workers of an endpoint](router.md#workers-of-an-endpoint)
        endpoint: Option<String> = None, (),
            "--endpoint NAMESPACE.COMPONENT.ENDPOINT KVFLASH_ROUTER_ENDPOINT DYN_ROUTER_ENDPOINT";
        /// Workers of --model-name; POST /workers adds more
        ///
        /// Takes one or several values, and may be repeated. Workers without an id are numbered from 1
        workers: Vec<String> = Vec::new(), (),
            "--worker URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,dp=N]";
        /// Model of --worker
        model_name: String = "default".to_owned(), (), "--model-name NAME";
        /// Tenant of --worker
        tenant_id: String = "default".to_owned(), (), "--tenant-id NAME";
    }
    "Limits and timeouts": {
        /// Largest request body; larger ones are refused with 413
        max_body_bytes: usize = 8 * 1024 * 1024, Legal::Bytes(1, false), "--max-body-bytes SIZE";
        /// Maximum reservations per model; more are refused with 429
        max_requests: usize = 65_536, 1..=10_000_000, "--max-concurrent-requests";
        /// Maximum number of workers
        max_workers: usize = 4_096, 1..=65_535, "--max-workers";
        /// Time for running calls to finish after SIGTERM
        ///
        /// A second SIGTERM stops the process at once
        drain_timeout: Duration = Duration::from_secs(5), 0.0..=86_400.0, "--drain-timeout SECONDS";
    } }
}

settings! {
    /// Settings of every service's connections: limits, saved registrations, keys and ports.
    HttpSettings { "Connections": {
        /// Longest time for a request's body to arrive
        ///
        /// After 5 seconds, the body must also have arrived at 8 KiB per second or more
        body_timeout: Duration = Duration::from_secs(60), 0.001..=86_400.0, "--body-timeout SECONDS";
        /// Memory for request bodies above 16 KiB; 0: a quarter of the available memory, at least 256MiB
        ///
        /// Counts the bodies of requests that are arriving, waiting or being answered. Beyond the limit, requests
        /// are refused with 429. The available memory is the control group's limit, else the machine's memory
        max_buffered_bytes: usize = 0, Legal::Bytes(1 << 20, true), "--max-buffered-bytes SIZE";
        /// Time that a connection may be idle between two requests
        ///
        /// Set it longer than the idle timeout of a load balancer in front: balancers do not repeat a request after
        /// its connection closed
        keep_alive_timeout: Duration = Duration::from_secs(75), 0.001..=86_400.0,
            "--keep-alive-timeout SECONDS";
        /// Time after SIGTERM during which /ready answers 503 but requests are still served
        ///
        /// Load balancers that check readiness stop sending new requests in this time. Skipped after SIGINT
        lame_duck_timeout: Duration = Duration::from_secs(5), 0.0..=86_400.0,
            "--lame-duck-timeout SECONDS";
        /// Share the port with another process that has this flag
        ///
        /// A new process can then take over before the old one ends. Without the flag, a port in use is an error
        reuse_port: bool = false, (), "--reuse-port";
        /// Maximum open connections; at the limit only probes are answered
        ///
        /// Probes are `/live`, `/ready`, `/health` and `/metrics`. All other requests get 503 and a closed connection
        max_connections: usize = 16_384, 1..=1_000_000, "--max-connections";
        /// Maximum open connections per client address; further ones are closed
        ///
        /// 0: no limit. The IPv6 addresses of one /64 network count as one
        max_connections_per_address: usize = 2_048, 0..=1_000_000, "--max-connections-per-address";
        /// Addresses of load balancers, such as 10.0.0.0/8; no limit per address applies to them
        ///
        /// The `X-Forwarded-For` that they send names the client for --fairness
        trusted_proxies: String = String::new(), (), "--trusted-proxies ADDRESS[/BITS],...";
        /// Save workers registered over HTTP in this file, and load them at the next start
        ///
        /// Saves workers from `POST /workers` and `POST /register` until their DELETE or `/unregister`, but not
        /// workers from flags or discovery
        state_file: Option<PathBuf> = None, (), "--state-file FILE";
    }
    "Access": {
        /// File of callers' keys, written by `kvflash keys add`; reread when it changes
        ///
        /// Once the file has a client key, the public API requires one. Likewise an admin key closes everything
        /// else, and a metrics key closes `/metrics` and `/health`, to callers without such a key. See
        /// [keys](security.md#keys)
        keys_file: Option<PathBuf> = None, (), "--keys-file FILE";
        /// File of public keys (JWKS) that verify callers' tokens (JWT); reread when it changes
        ///
        /// Requires --jwt-issuer and --jwt-audience. Closes everything but `/live` and `/ready` to callers without a
        /// token or a key. See [tokens](security.md#tokens)
        jwt_jwks_file: Option<PathBuf> = None, (), "--jwt-jwks-file FILE";
        /// Issuer that tokens must name (iss)
        jwt_issuer: Option<String> = None, (), "--jwt-issuer NAME";
        /// Audience that tokens must name (aud)
        jwt_audience: Option<String> = None, (), "--jwt-audience NAME";
        /// Claim of tokens that holds the role: admin, client or metrics
        jwt_role_claim: String = "kvflash_role".to_owned(), (), "--jwt-role-claim NAME";
        /// File with a secret that hides block hashes in `/dump` and `/digest`
        ///
        /// See [hashes that tell nothing](tenants.md#hashes-that-tell-nothing)
        hash_secret_file: Option<PathBuf> = None, (), "--hash-secret-file FILE";
        /// File with the key that this service sends to its remote indexer and peers
        ///
        /// Must be an admin key of those services. Reread when it changes
        service_key_file: Option<PathBuf> = None, (), "--service-key-file FILE";
        /// Serve the admin side on a port of its own instead of on --port
        ///
        /// The admin side is everything but the clients' API, `/live`, `/ready`, `/health` and `/metrics`. See
        /// [two sides](security.md#two-sides)
        admin_port: Option<u16> = None, 0..=65_535, "--admin-port";
        /// Address for --admin-port to listen on [127.0.0.1]
        admin_host: Option<String> = None, (), "--admin-host ADDRESS";
        /// Serve the admin side without a key to every client that reaches --port
        ///
        /// Without an admin key and without --admin-port, only clients on the same machine may use it by default
        open_admin: bool = false, (), "--open-admin";
        /// Further names that requests from the same machine may have in Host
        ///
        /// In addition to localhost and this machine's name; needed for reverse proxies that pass on Host
        allowed_hosts: String = String::new(), (), "--allowed-hosts NAME,...";
        /// Origins of web pages that may use the clients' API, or * for all
        ///
        /// Writes from other pages are refused unless they carry a key
        cors_origin: String = String::new(), (), "--cors-origin ORIGIN,...";
        /// Addresses allowed for workers added over HTTP, such as 10.0.0.0/8; unset: any
        ///
        /// Applies to `POST /workers` and `POST /register`, which never accept link-local addresses, `ipc://` or
        /// `inproc://`. Does not apply to workers from flags, DNS or discovery
        worker_allow: String = String::new(), (), "--worker-allow ADDRESS[/BITS],...";
        /// CA certificates (PEM) to verify https:// engines, indexers and peers; unset: the system's
        ///
        /// See [TLS everywhere](security.md#tls-everywhere)
        tls_ca_path: Option<PathBuf> = None, (), "--tls-ca-path FILE";
        /// Client certificate chain (PEM) for engines, indexers and peers; requires --tls-client-key-path
        tls_client_cert_path: Option<PathBuf> = None, (), "--tls-client-cert-path FILE";
        /// Private key (PEM) of the client certificate
        tls_client_key_path: Option<PathBuf> = None, (), "--tls-client-key-path FILE";
    } }
}

settings! {
    /// The paths of a service's certificate, its key, and the authorities of its clients.
    TlsSettings { "TLS": {
        /// Serve HTTPS with this certificate chain (PEM); requires --tls-key-path
        ///
        /// See [HTTPS](frontend.md#https)
        tls_cert_path: Option<PathBuf> = None, (), "--tls-cert-path FILE DYN_TLS_CERT_PATH";
        /// Private key (PEM) of the certificate
        tls_key_path: Option<PathBuf> = None, (), "--tls-key-path FILE DYN_TLS_KEY_PATH";
        /// CA certificates (PEM) that sign clients' certificates, for the `certificate` lines of --keys-file
        ///
        /// See [Certificates instead of keys](security.md#certificates-instead-of-keys)
        tls_client_ca_path: Option<PathBuf> = None, (), "--tls-client-ca-path FILE";
    } }
}

settings! {
    /// Settings of indexers, besides the limits of the index.
    IndexerOptions { "Server and log": {
        /// Address to listen on
        host: String = "0.0.0.0".to_owned(), (), "--host ADDRESS";
        /// Port to listen on; 0 picks a free one
        port: u16 = 8090, 0..=65_535, "--port";
        /// Threads that serve HTTP
        ///
        /// On a machine shared with clients or engines, more threads than spare cores only increase the p99
        threads: usize = 4, 1..=1_024, "--threads";
        /// Prefix of the names in /metrics, without the underscore
        metrics_prefix: String = PREFIX.to_owned(), (), "--metrics-prefix PREFIX DYN_METRICS_PREFIX";
    }
    "Workers": {
        /// Tokens per KV block of the workers in --workers and --worker
        ///
        /// Required with --workers
        block_size: Option<u32> = None, 1..=u64::from(u32::MAX), "--block-size TOKENS";
        /// Engines to subscribe to at the start
        ///
        /// Engines given this way have no replay endpoint
        workers: String = String::new(), (), "--workers ID[:DP_RANK]=ENDPOINT,...";
        /// Indexers to recover from at the start; the first healthy one is used
        ///
        /// See [replicas](indexer.md#replicas)
        peers: Vec<String> = Vec::new(), (), "--peers URL,...";
        /// Model of --workers and --worker
        model_name: String = "default".to_owned(), (), "--model-name NAME";
        /// Tenant of --workers and --worker
        tenant_id: String = "default".to_owned(), (), "--tenant-id NAME";
    }
    "Limits": {
        /// Maximum number of workers from --worker and --discovery
        max_workers: usize = 4_096, 1..=65_535, "--max-workers";
        /// Largest request body; larger ones are refused with 413
        max_body_bytes: usize = 8 * 1024 * 1024, Legal::Bytes(1, false), "--max-body-bytes SIZE";
        /// Number of workers to wait for before /ready answers 200
        ///
        /// Counts instances, not ranks
        min_initial_workers: usize = 0, 0..=65_535,
            "--min-initial-workers COUNT KVFLASH_ROUTER_MIN_INITIAL_WORKERS \
             DYN_ROUTER_MIN_INITIAL_WORKERS";
        /// Time for running calls to finish after a stop
        drain_timeout_s: Duration = Duration::from_secs(5), 0.0..=86_400.0, "";
        /// Serve POST /test/pause_listener and /test/resume_listener
        test_endpoints: bool = false, (), "";
    } }
}

/// Every setting of a service, in the order of its help: its own, and those that a routing file may
/// also set.
///
/// The services are `frontend`, `router` and `indexer`.
pub fn tables() -> [(&'static str, Vec<Setting>, Vec<Setting>); 3] {
    let (cluster, log) = (ClusterSettings::table(), LogSettings::table());
    let http = HttpSettings::table();
    let mut of_router = routing_table();
    for setting in of_router.iter_mut().filter(|setting| setting.key == "block_size") {
        setting.spelled.push_str(" --router-block-size --block-size");
    }
    let fleet = FleetSettings::table();
    let mut of_indexer = fleet.clone();
    for setting in &mut of_indexer {
        match setting.key {
            // In Python these are its --workers.
            "workers" => setting.key = "engines",
            "discovery" => setting.help[0] = "Where to find workers; unset: nowhere",
            _ => {}
        }
    }
    let own =
        |table: Vec<Setting>| [log.clone(), table, http.clone(), TlsSettings::table()].concat();
    [
        (
            "frontend",
            own([fleet, FrontendSettings::table()].concat()),
            [routing_table(), FairnessSettings::table(), cluster.clone()].concat(),
        ),
        ("router", own(RouterSettings::table()), [of_router, cluster].concat()),
        (
            "indexer",
            [own(IndexerOptions::table()), of_indexer, IndexSettings::table()].concat(),
            Vec::new(),
        ),
    ]
}
