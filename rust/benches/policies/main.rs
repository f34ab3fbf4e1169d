//! Every policy before eight simulated engines: what is reused, how long the first token takes, how
//! evenly work is spread and who is served how much.
//!
//! `cargo bench --bench policies -- [--trace PATH] [--speed N] [--requests N] [--only NAME] [--write FILE]`

mod report;
mod sim;

use std::path::PathBuf;
use std::time::Instant;

use sim::outcome::Outcome;
use sim::play::play;
use sim::row::Row;
use sim::workload::Workload;

/// Requests that run at once behind a queue, for each worker.
const MAX_RUNNING: usize = 32;

/// How many times faster than it was recorded the trace is played.
const SPEED: f64 = 5.0;

struct Options {
    trace: Option<PathBuf>,
    speed: f64,
    requests: usize,
    only: String,
    write: Option<PathBuf>,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        trace: None,
        speed: SPEED,
        requests: usize::MAX,
        only: String::new(),
        write: None,
    };
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    while let Some(name) = words.next() {
        let value = words.next().ok_or_else(|| format!("{name} needs a value"))?;
        let path = || Some(PathBuf::from(&value)).filter(|path| !path.as_os_str().is_empty());
        let illegal = || format!("{name} must be a number above 0, got {value:?}");
        match name.as_str() {
            "--trace" => options.trace = path(),
            "--write" => options.write = path(),
            "--speed" => options.speed = value.parse().map_err(|_| illegal())?,
            "--requests" => options.requests = value.parse().map_err(|_| illegal())?,
            "--only" => options.only = value,
            _ => return Err(format!("unknown option {name}")),
        }
    }
    Ok(options)
}

fn main() {
    if let Err(fault) = run() {
        eprintln!("policies: {fault}");
        std::process::exit(2);
    }
}

fn run() -> Result<(), String> {
    let options = options()?;
    let conversations = match &options.trace {
        Some(path) => Workload::recorded(path, options.speed)?,
        None => Workload::made_up(12_031, options.speed),
    };
    let tenants = Workload::tenants(1, 120.0, 24.0);
    let mut text = String::new();
    for mut workload in [conversations, tenants] {
        workload.requests.truncate(options.requests);
        println!("{}: {} requests", workload.name, workload.requests.len());
        let mut runs = Vec::new();
        for row in Row::all(MAX_RUNNING) {
            if row.name.contains(&options.only) {
                let start = Instant::now();
                let outcome = play(&workload, &row);
                print(&row, &outcome, start.elapsed().as_secs_f64());
                runs.push((row, outcome));
            }
        }
        let title = title(&workload, options.speed);
        text.push_str(&report::table(&title, &workload, &runs));
        text.push_str(&report::turns(&runs));
    }
    match &options.write {
        Some(path) => report::write(path, text.trim_end()),
        None => Ok(()),
    }
}

fn title(workload: &Workload, speed: f64) -> String {
    let count = workload.requests.len();
    let minutes = workload.requests.last().map_or(0.0, |one| one.at_us as f64 / 6e7);
    let clients = workload.clients.len();
    match workload.name.as_str() {
        "tenants" => format!(
            "Tenants (generated): {count} requests in {minutes:.1} minutes by {clients} clients, four of which flood:"
        ),
        kind => format!(
            "Conversations ({kind}, {speed} times as fast): {count} requests in {minutes:.1} minutes, {clients} conversations:"
        ),
    }
}

fn print(row: &Row, outcome: &Outcome, took_s: f64) {
    println!(
        "{:42} hit {:.3} of best {:.3} ttft p50 {:7.0} p99 {:7.0} light {:7.0} {:7.0} gap {:5.1} {:5.1} spread {:.2} {:.2} jain {:.3} tok/s {:7.0} work/s {:7.0} end {:5.1} preempted {} ({took_s:.1} s)",
        row.name,
        outcome.hit_rate(),
        outcome.of_best(),
        outcome.ttft_ms(0.5, false),
        outcome.ttft_ms(0.99, false),
        outcome.ttft_ms(0.5, true),
        outcome.ttft_ms(0.99, true),
        outcome.gap_ms(0.5),
        outcome.gap_ms(0.99),
        outcome.prefill_spread(),
        outcome.request_spread(),
        outcome.jain(),
        outcome.tokens_per_s(),
        outcome.work_per_s(),
        outcome.makespan_s(),
        outcome.preemptions(),
    );
}
