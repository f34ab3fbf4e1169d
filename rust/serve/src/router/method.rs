//! POST /: messages with a `method`, as routers on a request plane accept them.

use std::net::IpAddr;

use kvflash_core::error::{Error, Result};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::indexer::request::TokenIds;
use super::app::App;
use super::choose::{Answer, Chosen};
use super::request::Choose;

/// A message. Its request id is in it, or in the header `x-request-id`.
#[derive(Debug, Deserialize)]
#[serde(tag = "method", rename_all = "snake_case")]
pub(super) enum Message {
    New {
        #[serde(alias = "token_ids")]
        tokens: TokenIds,
        #[serde(flatten)]
        about: About,
        #[serde(flatten)]
        urgency: Urgency,
    },
    MarkPrefill {
        #[serde(flatten)]
        about: About,
    },
    MarkFree {
        #[serde(flatten)]
        about: About,
    },
    PotentialLoads {
        #[serde(alias = "token_ids")]
        tokens: TokenIds,
        #[serde(flatten)]
        about: About,
    },
}

/// Fields of every message.
#[derive(Debug, Default, Deserialize)]
pub(super) struct About {
    request_id: Option<String>,
    #[serde(alias = "model")]
    model_name: Option<String>,
    tenant_id: Option<String>,
    lora_name: Option<String>,
    cache_salt: Option<String>,
    user: Option<String>,
    session_key: Option<String>,
}

/// A new request's priority, expected answer and seed.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Urgency {
    priority: Option<f64>,
    strict_priority: Option<u32>,
    expected_output_tokens: Option<u64>,
    seed: Option<u64>,
}

impl About {
    fn choose(self, tokens: TokenIds) -> Choose {
        Choose {
            model_name: self.model_name,
            tenant_id: self.tenant_id,
            token_ids: Some(tokens),
            lora_name: self.lora_name,
            cache_salt: self.cache_salt,
            request_id: self.request_id,
            user: self.user,
            session_key: self.session_key,
            ..Choose::default()
        }
    }

    fn name(&self) -> Result<&str> {
        self.request_id.as_deref().ok_or_else(|| {
            Error::invalid("missing field `request_id`, or the header x-request-id instead")
        })
    }
}

/// Executes `message`; `request_id` is the header's.
///
/// # Errors
/// As the corresponding routes. `new` without a name books nothing, because it could not be freed.
pub(super) async fn obey(
    app: &App,
    message: Message,
    request_id: Option<String>,
    caller: Option<IpAddr>,
) -> Result<Value> {
    let named = |about: About| About { request_id: about.request_id.or(request_id), ..about };
    match message {
        Message::New { tokens, about, urgency } => {
            let Urgency { priority, strict_priority, expected_output_tokens, seed } = urgency;
            let choose = named(about).choose(tokens);
            let choose = Choose {
                caller,
                priority,
                strict_priority,
                expected_output_tokens,
                seed,
                ..choose
            };
            let is_named = choose.request_id.is_some();
            let chosen = Chosen::advised(app, choose).await?;
            let answer = if is_named { chosen.reserve(app).await? } else { chosen.query(app)? };
            let Answer { worker_id, dp_rank, overlap_blocks, .. } = answer;
            let mut answer = json!({
                "method": "new",
                "worker_id": worker_id,
                "dp_rank": dp_rank,
                "overlap_blocks": overlap_blocks,
            });
            // Only if the request had one: other clients expect the published response.
            if let Some(seed) = seed {
                answer["seed"] = json!(seed);
            }
            Ok(answer)
        }
        Message::MarkPrefill { about } => {
            let about = named(about);
            let pools = app.fleet.fitting(about.model_name.as_deref(), about.tenant_id.as_deref());
            let name = about.name()?;
            let marked = pools.iter().filter(|p| p.selector.mark_prefill_completed(name).is_ok());
            Ok(json!({ "method": "prefill_marked", "success": marked.count() > 0 }))
        }
        Message::MarkFree { about } => {
            let about = named(about);
            let pools = app.fleet.fitting(about.model_name.as_deref(), about.tenant_id.as_deref());
            let name = about.name()?;
            let freed = pools.iter().filter(|pool| pool.selector.free(name));
            Ok(json!({ "method": "free_marked", "success": freed.count() > 0 }))
        }
        Message::PotentialLoads { tokens, about } => {
            let chosen = Chosen::understand(app, about.choose(tokens)).await?;
            let loads = chosen.potential_loads()?;
            let (pending_count, pending_isl_tokens) = chosen.pending();
            Ok(json!({
                "method": "potential_loads",
                "loads": loads,
                "pending_count": pending_count,
                "pending_isl_tokens": pending_isl_tokens,
            }))
        }
    }
}
