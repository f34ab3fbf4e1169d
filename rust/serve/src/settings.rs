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
        /// debug has a line for each decision
        log_level: String = "info".to_owned(), &["error", "warn", "info", "debug", "trace"],
            "--log-level LEVEL";
        /// Format of log lines
        log_format: String = "text".to_owned(), &["text", "json"], "--log-format";
    } }
}

settings! {
    /// Where a frontend or an indexer finds its workers. The core uses none of these.
    FleetSettings { "Workers": {
        /// Engine URLs; dns+http://NAME stands for every address of the name
        ///
        /// One or several, may be repeated. Of an indexer: [engines without
        /// registration](indexer.md#engines-without-registration)
        workers: Vec<String> = Vec::new(), (),
            "--worker URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,role=ROLE][,dp=N]";
        /// Pause between two DNS lookups of dns+http:// workers
        ///
        /// See [engines found by DNS](frontend.md#engines-found-by-dns)
        worker_dns_interval_secs: Duration = Duration::from_secs(5), 0.1..=3_600.0,
            "--worker-dns-interval-secs SECONDS";
        /// Name server for them instead of those in /etc/resolv.conf
        worker_dns_server: Option<String> = None, (), "--worker-dns-server ADDRESS[:PORT]";
        /// Where to find workers; file unless --worker is given
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
        /// `KVFLASH_HTTP_HOST` takes precedence over `KVFLASH_HOST`, which is also the address that others
        /// reach this process at
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
        /// Engines that only prefill; a decode engine of the model continues
        ///
        /// See [disaggregated serving](disaggregation.md)
        prefill_workers: Vec<String> = Vec::new(), (),
            "--prefill-worker URL[,events=ADDRESS][,replay=ADDRESS][,id=N][,dp=N]";
        /// Engines that continue from prefill engines, or do all without one
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
        /// Folder with tokenizer.json, or a model in the local Hub cache, of all models or of one
        ///
        /// The chat template is read there, too. `MODEL=FOLDER` is for that model alone; may be repeated.
        /// Without one, a model's tokenizer is that of its workers' cards; without these engines are asked to
        /// tokenize. See [tokenizers](frontend.md#a-tokenizer-for-each-model)
        tokenizer: Vec<String> = Vec::new(), (), "--tokenizer [MODEL=]FOLDER";
        /// Memory for text seen before: its tokens, and messages of chats
        ///
        /// Three quarters are for tokens. The least recently used entries are dropped
        tokenizer_cache: usize = 256 * 1024 * 1024, Legal::Bytes(1, false), "--tokenizer-cache --text-cache-bytes SIZE";
        /// Format of the reasoning in chats of runtime workers that return tokens; none: it is content
        ///
        /// The parser takes it out of the content and into `reasoning_content`. A name that a worker's card gives
        /// comes before this one. An unknown name is refused with the list of known ones. See
        /// [reasoning and tool calls](runtime.md#reasoning-and-tool-calls)
        reasoning_parser: Option<String> = None, (), "--reasoning-parser NAME";
        /// Format of tool calls in their chats: hermes, llama3_json or mistral; none: they are content
        ///
        /// For requests with `tools`. A name that a worker's card gives comes before this one. See
        /// [reasoning and tool calls](runtime.md#reasoning-and-tool-calls)
        tool_call_parser: Option<String> = None, (), "--tool-call-parser NAME";
        /// Time between comparisons of the tokens made here with the engines' own; 0: never
        ///
        /// See [the same tokens as the engine's](frontend.md#the-same-tokens-as-the-engines)
        parity_interval: Duration = Duration::from_secs(3_600), 0.0..=31_536_000.0,
            "--parity-interval SECONDS";
        /// Send prompts as token ids to engines that take them, so that they need not tokenize again
        ///
        /// Each engine is asked when it starts; only prompts that are known to give the engine's own tokens
        /// are sent this way. See [tokenized once](frontend.md#tokenized-once)
        send_token_ids: bool = true, (), "--send-token-ids --no-send-token-ids";
        /// Memory for token ids that engines return for chats without a tokenizer; 0: never ask
        ///
        /// Without a tokenizer and without an engine's own `/tokenize`, chats are sent with `return_token_ids`, and
        /// the next turn is matched by the ids of the last one. The least recently used conversations are dropped. See
        /// [taught by answers](frontend.md#taught-by-answers)
        taught_cache: usize = 64 * 1024 * 1024, Legal::Bytes(1, true), "--taught-cache SIZE";
        /// Key for the frontend's own calls to workers; better in a file or in the environment
        ///
        /// For health, models and `/tokenize`, and for requests of clients that have a key of --keys-file; other
        /// clients' requests carry their own. Workers that are added over HTTP do not get it: see
        /// [workers that somebody adds](security.md#workers-that-somebody-adds)
        worker_api_key: Option<String> = None, (), "--worker-api-key KEY";
        /// File with that key, so that no process list shows it
        worker_api_key_file: Option<PathBuf> = None, (), "--worker-api-key-file FILE";
    }
    "Access": {
        /// File with the secret that the cache salts of isolated tenants are made with
        ///
        /// The same in every replica; see [tenants](tenants.md#isolation)
        salt_secret_file: Option<PathBuf> = None, (), "--salt-secret-file FILE";
        /// Show clients with keys which worker answered and how much of the prompt it held
        ///
        /// Clients without keys see these headers anyway
        expose_overlap: bool = false, (), "--expose-overlap";
    }
    "Limits and timeouts": {
        /// Longest prompt; longer ones are refused with 400. 0: 16 bytes a token of the model's limit
        ///
        /// Counts bytes of text, not of images; a number or token id counts 8. The limit of tokens is the
        /// smallest `max_model_len` of the model's workers; 4MiB while it is unknown
        max_prompt_bytes: usize = 0, Legal::Bytes(1, true), "--max-prompt-bytes SIZE";
        /// Largest request body; larger ones are refused with 413
        max_body_bytes: usize = 32 * 1024 * 1024, Legal::Bytes(1, false), "--max-body-bytes SIZE";
        /// Largest upload of sound; larger ones are refused with 413
        ///
        /// `/v1/audio/transcriptions` and `/v1/audio/translations`
        max_upload_bytes: usize = 32 * 1024 * 1024, Legal::Bytes(1, false), "--max-upload-bytes SIZE";
        /// Maximum requests in flight; more are refused with 429
        max_concurrent_requests: usize = 4_096, 1..=10_000_000, "--max-concurrent-requests";
        /// Answer /ready with 503 once requests in flight were at their maximum for 10 s
        ///
        /// For balancers that have other replicas with room. Off, because under overload all replicas
        /// would leave at once
        ready_fails_when_full: bool = false, (), "--ready-fails-when-full";
        /// Maximum number of workers
        max_workers: usize = 4_096, 1..=65_535, "--max-workers";
        /// Workers that a request may try before its first byte
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
        /// After it the answer is cut off
        stream_idle_timeout: Duration = Duration::from_secs(300), 0.001..=86_400.0,
            "--stream-idle-timeout SECONDS";
        /// Longest time for an engine's /tokenize
        tokenize_timeout: Duration = Duration::from_secs(2), 0.001..=86_400.0,
            "--tokenize-timeout SECONDS";
        /// Pause between two health checks of a worker
        ///
        /// For an unhealthy worker 0.25 s at first, then twice as long each time, up to this
        health_interval: Duration = Duration::from_secs(2), 0.001..=86_400.0,
            "--health-interval SECONDS";
        /// Time for running requests to finish after --lame-duck-timeout
        ///
        /// A second SIGTERM ends it at once
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
        /// Queue requests and let clients take turns by the tokens they were served
        ///
        /// See [the fair queue](policies.md#the-fair-queue)
        fairness: String = "none".to_owned(), &["none", "vtc-fair", "vtc-max-fair", "vtc-pred"],
            "--fairness";
        /// The identity of a client: authorization, user or header:NAME
        ///
        /// By default its `Authorization`, without one the header or field `user`, else its address. `user` goes by
        /// what clients call themselves, `header:NAME` by a header that a gateway sets. A client with a
        /// [key](tenants.md#fair-turns) is known by that
        fairness_identity: String = "authorization".to_owned(), (), "--fairness-identity IDENTITY";
        /// Clients with a larger (above 1) or smaller share
        fairness_weight: Vec<(String, f64)> = Vec::new(), (), "--fairness-weight CLIENT=WEIGHT,...";
        /// Maximum queued requests per client; more are refused with 429
        fairness_queue_limit: usize = 1_024, 1..=10_000_000, "--fairness-queue-limit";
        /// Longest wait for a turn before a request is refused with 503
        fairness_queue_timeout: Duration = Duration::from_secs(60), 0.001..=86_400.0,
            "--fairness-queue-timeout SECONDS";
        /// Running requests per healthy worker; the others wait
        fairness_max_running: usize = 256, 1..=10_000_000, "--fairness-max-running";
        /// Share of the price that cached prompt tokens cost
        fairness_cached_share: f64 = 0.0, 0.0..=1.0, "--fairness-cached-share";
    } }
}

settings! {
    /// Settings of standalone routers only.
    RouterSettings { "Server and log": {
        /// Address to listen on
        ///
        /// `KVFLASH_HTTP_HOST` takes precedence over `KVFLASH_HOST`, which is also the address that others
        /// reach this process at
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
        /// One or several, may be repeated; numbered from 1 where no id is given
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
        /// Time for running calls after SIGTERM
        ///
        /// A second one ends it at once
        drain_timeout: Duration = Duration::from_secs(5), 0.0..=86_400.0, "--drain-timeout SECONDS";
    } }
}

settings! {
    /// Settings of every service's connections: limits, saved registrations, keys and ports.
    HttpSettings { "Connections": {
        /// Longest time for a request's body to arrive
        ///
        /// After 5 seconds at least 8 KiB for each second must have arrived, too
        body_timeout: Duration = Duration::from_secs(60), 0.001..=86_400.0, "--body-timeout SECONDS";
        /// Memory for request bodies above 16 KiB; 0: a quarter of the memory, at least 256MiB
        ///
        /// Counts bodies that are being received, wait or are answered; more are refused with 429. The memory
        /// is that of the control group
        max_buffered_bytes: usize = 0, Legal::Bytes(1 << 20, true), "--max-buffered-bytes SIZE";
        /// Time that a connection may be idle between two requests
        ///
        /// Set it longer than the timeout of balancers in front: they do not repeat a request after its
        /// connection closed
        keep_alive_timeout: Duration = Duration::from_secs(75), 0.001..=86_400.0,
            "--keep-alive-timeout SECONDS";
        /// Time after SIGTERM in which /ready is 503 and requests are still taken
        ///
        /// Balancers that ask for readiness send no new ones meanwhile. None after SIGINT
        lame_duck_timeout: Duration = Duration::from_secs(5), 0.0..=86_400.0,
            "--lame-duck-timeout SECONDS";
        /// Share the port with another process that has this flag
        ///
        /// A new process can take over before the old one ends. Without the flag a taken port is an error
        reuse_port: bool = false, (), "--reuse-port";
        /// Maximum open connections; at the limit only probes are answered
        ///
        /// `/live`, `/ready`, `/health` and `/metrics`; all else gets 503 and a closed connection
        max_connections: usize = 16_384, 1..=1_000_000, "--max-connections";
        /// Maximum open connections of one address; further ones are closed
        ///
        /// 0: no limit
        max_connections_per_address: usize = 2_048, 0..=1_000_000, "--max-connections-per-address";
        /// Addresses with any number of connections, such as 10.0.0.0/8 of the balancers
        ///
        /// Their `X-Forwarded-For` names the client that --fairness counts
        trusted_proxies: String = String::new(), (), "--trusted-proxies ADDRESS[/BITS],...";
        /// Keep what is registered over HTTP in this file, for the next start
        ///
        /// `POST /workers` and `POST /register`, until their DELETE or `/unregister`. Workers from flags or
        /// discovery are not kept in it
        state_file: Option<PathBuf> = None, (), "--state-file FILE";
    }
    "Access": {
        /// File of the keys that callers need, made by `kvflash keys add`; read again when it changes
        ///
        /// A key of a client closes the public API, one of an admin closes everything else, and one of the role
        /// metrics closes `/metrics` and `/health`, each to callers without such a key. See [keys](security.md#keys)
        keys_file: Option<PathBuf> = None, (), "--keys-file FILE";
        /// File of public keys (JWKS) that check tokens (JWT) of callers; read again when it changes
        ///
        /// Needs --jwt-issuer and --jwt-audience. Closes everything but `/live` and `/ready` to callers without a token
        /// or a key. See [tokens](security.md#tokens)
        jwt_jwks_file: Option<PathBuf> = None, (), "--jwt-jwks-file FILE";
        /// Issuer that tokens must name (iss)
        jwt_issuer: Option<String> = None, (), "--jwt-issuer NAME";
        /// Audience that tokens must name (aud)
        jwt_audience: Option<String> = None, (), "--jwt-audience NAME";
        /// Claim of tokens that has the role: admin, client or metrics
        jwt_role_claim: String = "kvflash_role".to_owned(), (), "--jwt-role-claim NAME";
        /// File with a secret that hides block hashes in `/dump` and `/digest`
        ///
        /// See [hashes that tell nothing](tenants.md#hashes-that-tell-nothing)
        hash_secret_file: Option<PathBuf> = None, (), "--hash-secret-file FILE";
        /// File with the key that this service shows at others of ours: the remote indexer, peers
        ///
        /// An admin key of theirs. Read again when it changes
        service_key_file: Option<PathBuf> = None, (), "--service-key-file FILE";
        /// Serve the admin side at a port of its own, and not on --port
        ///
        /// Everything but the clients' API, `/live`, `/ready`, `/health` and `/metrics`. See
        /// [two sides](security.md#two-sides)
        admin_port: Option<u16> = None, 0..=65_535, "--admin-port";
        /// Address of that port [127.0.0.1]
        admin_host: Option<String> = None, (), "--admin-host ADDRESS";
        /// Serve the admin side to everybody who reaches --port, without a key
        ///
        /// Without an admin key and without --admin-port only clients on the same machine may use it
        open_admin: bool = false, (), "--open-admin";
        /// Further names of this service that requests on the same machine may have in Host
        ///
        /// Beside localhost and this machine's name: for reverse proxies that pass on Host
        allowed_hosts: String = String::new(), (), "--allowed-hosts NAME,...";
        /// Web pages that may use the clients' API: their origins, or *
        ///
        /// Writes of other pages are refused unless they carry a key
        cors_origin: String = String::new(), (), "--cors-origin ORIGIN,...";
        /// Addresses that workers may have which are added over HTTP, such as 10.0.0.0/8; any without it
        ///
        /// `POST /workers` and `POST /register`. Never link-local ones, and no `ipc://` or `inproc://`. Flags,
        /// DNS and discovery are not bound by it
        worker_allow: String = String::new(), (), "--worker-allow ADDRESS[/BITS],...";
        /// Authorities (PEM) to check https:// engines, indexers and peers against; the system's without it
        ///
        /// See [TLS everywhere](security.md#tls-everywhere)
        tls_ca_path: Option<PathBuf> = None, (), "--tls-ca-path FILE";
        /// Certificate chain (PEM) to show to them; needs --tls-client-key-path
        tls_client_cert_path: Option<PathBuf> = None, (), "--tls-client-cert-path FILE";
        /// Private key of that certificate (PEM)
        tls_client_key_path: Option<PathBuf> = None, (), "--tls-client-key-path FILE";
    } }
}

settings! {
    /// The paths of a service's certificate, its key, and the authorities of its clients.
    TlsSettings { "TLS": {
        /// Serve HTTPS with this certificate chain (PEM); needs --tls-key-path
        ///
        /// See [HTTPS](frontend.md#https)
        tls_cert_path: Option<PathBuf> = None, (), "--tls-cert-path FILE DYN_TLS_CERT_PATH";
        /// Private key of the certificate (PEM)
        tls_key_path: Option<PathBuf> = None, (), "--tls-key-path FILE DYN_TLS_KEY_PATH";
        /// Authorities (PEM) that sign clients' certificates, for the `certificate` lines of --keys-file
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
        /// On a machine shared with clients or engines, more threads than spare cores only raise the p99
        threads: usize = 4, 1..=1_024, "--threads";
        /// Prefix of the names in /metrics, without the underscore
        metrics_prefix: String = PREFIX.to_owned(), (), "--metrics-prefix PREFIX DYN_METRICS_PREFIX";
    }
    "Workers": {
        /// Tokens per KV block of --workers and --worker
        ///
        /// Required with --workers
        block_size: Option<u32> = None, 1..=u64::from(u32::MAX), "--block-size TOKENS";
        /// Engines to subscribe to at the start
        ///
        /// They have no replay endpoint
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
        /// Maximum number of workers of --worker and --discovery
        max_workers: usize = 4_096, 1..=65_535, "--max-workers";
        /// Largest request body; larger ones are refused with 413
        max_body_bytes: usize = 8 * 1024 * 1024, Legal::Bytes(1, false), "--max-body-bytes SIZE";
        /// Workers to wait for before /ready says so
        ///
        /// Counts instances, not ranks
        min_initial_workers: usize = 0, 0..=65_535,
            "--min-initial-workers COUNT KVFLASH_ROUTER_MIN_INITIAL_WORKERS \
             DYN_ROUTER_MIN_INITIAL_WORKERS";
        /// Time for running calls after a stop
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
            "discovery" => setting.help[0] = "Where to find workers; nowhere unless it is given",
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
