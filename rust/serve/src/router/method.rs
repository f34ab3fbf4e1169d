//! POST /: messages with a `method`, as routers on a request plane accept them.

use std::net::IpAddr;

use kvflash_core::error::{Error, Result};
use kvflash_core::select::Selector;
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::indexer::request::TokenIds;
use super::app::App;
use super::choose::{Answer, Chosen};
use super::request::Choose;

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Method {
    New,
    MarkPrefill,
    MarkFree,
    PotentialLoads,
}

/// A message. Its request id is in it, or in the header `x-request-id`.
#[derive(Debug, Deserialize)]
pub(super) struct Message {
    method: Method,
    #[serde(alias = "token_ids")]
    tokens: Option<TokenIds>,
    request_id: Option<String>,
    #[serde(alias = "model")]
    model_name: Option<String>,
    tenant_id: Option<String>,
    lora_name: Option<String>,
    cache_salt: Option<String>,
    user: Option<String>,
    session_key: Option<String>,
    priority: Option<f64>,
    strict_priority: Option<u32>,
    expected_output_tokens: Option<u64>,
    seed: Option<u64>,
}

impl Message {
    fn choose(self, caller: Option<IpAddr>) -> Result<Choose> {
        let tokens = self.tokens.ok_or_else(|| Error::invalid("missing field `tokens`"))?;
        Ok(Choose {
            caller,
            model_name: self.model_name,
            tenant_id: self.tenant_id,
            token_ids: Some(tokens),
            lora_name: self.lora_name,
            cache_salt: self.cache_salt,
            request_id: self.request_id,
            user: self.user,
            session_key: self.session_key,
            priority: self.priority,
            strict_priority: self.strict_priority,
            expected_output_tokens: self.expected_output_tokens,
            seed: self.seed,
            ..Choose::default()
        })
    }

    /// In how many models `act` succeeds with the request that it names.
    fn count(&self, app: &App, act: impl Fn(&Selector, &str) -> bool) -> Result<usize> {
        let pools = app.fleet.fitting(self.model_name.as_deref(), self.tenant_id.as_deref());
        let name = self.request_id.as_deref().ok_or_else(|| {
            Error::invalid("missing field `request_id`, or the header x-request-id instead")
        })?;
        Ok(pools.iter().filter(|pool| act(&pool.selector, name)).count())
    }
}

/// Executes `message`; `request_id` is the header's.
///
/// # Errors
/// As the corresponding routes. `new` without a name books nothing, because it could not be freed.
pub(super) async fn obey(
    app: &App,
    mut message: Message,
    request_id: Option<String>,
    caller: Option<IpAddr>,
) -> Result<Value> {
    message.request_id = message.request_id.or(request_id);
    match message.method {
        Method::New => {
            let (seed, is_named) = (message.seed, message.request_id.is_some());
            let chosen = Chosen::advised(app, message.choose(caller)?).await?;
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
        Method::MarkPrefill => {
            let marked = message.count(app, |of, name| of.mark_prefill_completed(name).is_ok())?;
            Ok(json!({ "method": "prefill_marked", "success": marked > 0 }))
        }
        Method::MarkFree => {
            let freed = message.count(app, |of, name| of.free(name))?;
            Ok(json!({ "method": "free_marked", "success": freed > 0 }))
        }
        Method::PotentialLoads => {
            let chosen = Chosen::understand(app, message.choose(caller)?).await?;
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
