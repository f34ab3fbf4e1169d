//! Every policy before simulated engines: `make policies`.
//!
//! `kvflash-policies matrix|tables [--trace PATH] [--agents PATH] [--seed N] [--only ROW] [--cells TEXT] [--threads N]
//! [--requests N] [--speed N] [--write FILE] [--figures FILE]`

use std::path::PathBuf;
use std::time::Instant;

use kvflash_sim::matrix::{Cell, Played, Traces, run};
use kvflash_sim::outcome::Outcome;
use kvflash_sim::play::{Fleet, play};
use kvflash_sim::report;
use kvflash_sim::row::Row;
use kvflash_sim::traffic::{Traffic, tenants};
use kvflash_sim::workload::Workload;

/// Requests that run at once behind a queue, for each worker.
const MAX_RUNNING: usize = 32;
/// How many times faster than it was recorded the trace is played for the tables.
const SPEED: f64 = 2.5;

struct Options {
    is_matrix: bool,
    trace: Option<PathBuf>,
    agents: Option<PathBuf>,
    seed: u64,
    only: String,
    cells: String,
    threads: usize,
    requests: usize,
    speed: f64,
    write: Option<PathBuf>,
    figures: Option<PathBuf>,
}

fn options() -> Result<Options, String> {
    let mut words = std::env::args().skip(1);
    let is_matrix = match words.next().as_deref() {
        Some("matrix") => true,
        Some("tables") => false,
        got => return Err(format!("the first argument must be matrix or tables, got {got:?}")),
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut options = Options {
        is_matrix,
        trace: None,
        agents: None,
        seed: 1,
        only: String::new(),
        cells: String::new(),
        threads,
        requests: usize::MAX,
        speed: SPEED,
        write: None,
        figures: None,
    };
    while let Some(name) = words.next() {
        let value = words.next().ok_or_else(|| format!("{name} needs a value"))?;
        let path = || Some(PathBuf::from(&value)).filter(|path| !path.as_os_str().is_empty());
        let illegal = |_| format!("{name} must be a whole number, got {value:?}");
        match name.as_str() {
            "--trace" => options.trace = path(),
            "--agents" => options.agents = path(),
            "--write" => options.write = path(),
            "--figures" => options.figures = path(),
            "--seed" => options.seed = value.parse().map_err(illegal)?,
            "--threads" => options.threads = value.parse().map_err(illegal)?,
            "--requests" => options.requests = value.parse().map_err(illegal)?,
            "--speed" => {
                let speed = value.parse().ok().filter(|speed| *speed > 0.0);
                options.speed =
                    speed.ok_or(format!("{name} must be a number above 0, got {value:?}"))?;
            }
            "--only" => options.only = value,
            "--cells" => options.cells = value,
            _ => return Err(format!("unknown option {name}")),
        }
    }
    Ok(options)
}

fn main() {
    let done = options().and_then(|options| match options.is_matrix {
        true => matrix(&options),
        false => tables(&options),
    });
    if let Err(fault) = done {
        eprintln!("kvflash-policies: {fault}");
        std::process::exit(2);
    }
}

fn matrix(options: &Options) -> Result<(), String> {
    let mut rows = Row::matrix();
    rows.retain(|row| row.name.contains(&options.only));
    let mut cells = Cell::all();
    cells.retain(|cell| format!("{}: {}", cell.group, cell.name).contains(&options.cells));
    let start = Instant::now();
    let print = |played: &Played| {
        let (cell, took_s) = (&played.cell, start.elapsed().as_secs_f64());
        println!("{}: {} ({took_s:.0} s)", cell.group, cell.name);
        for ((row, figures), regrets) in rows.iter().zip(&played.figures).zip(played.regrets()) {
            let mean = report::mean(regrets.iter().copied());
            let values: Vec<String> =
                figures.values.iter().map(|value| format!("{value:8.3}")).collect();
            println!(
                "  {:42} {mean:5.2} hit {:.3} of best {:.3} busy {:.2} | {}",
                row.name,
                figures.hit,
                figures.of_best,
                figures.utilization,
                values.join(" ")
            );
        }
    };
    let traces = Traces::read(options.trace.as_deref(), options.agents.as_deref())?;
    let played = run(cells, &rows, &traces, options.seed, options.threads, &print);
    let text = report::regrets(&rows, &played);
    println!("\n{text}");
    if let Some(path) = &options.write {
        report::write(path, "regrets", &text)?;
        report::write(path, "cells", &report::cells(&rows, &played))?;
    }
    if let Some(path) = &options.figures {
        std::fs::write(path, report::figures(&rows, &played))
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

fn tables(options: &Options) -> Result<(), String> {
    let conversations = match &options.trace {
        Some(path) => Workload::conversations(path, options.speed)?,
        None => {
            let mut made = Traffic::Conversations.make(options.seed, 12_031);
            // As many a second as recorded.
            let seconds = 3_537.0 / options.speed;
            let factor = seconds * 1e6 / made.sessions.last().map_or(1, |one| one.at_us) as f64;
            for session in &mut made.sessions {
                session.at_us = (session.at_us as f64 * factor) as u64;
            }
            made
        }
    };
    let fleet = Fleet { capacity_tokens: 1 << 20, ..Fleet::of(8) };
    let mut text = String::new();
    for mut workload in [conversations, tenants(options.seed, 120.0, 14.0)] {
        workload.truncate(options.requests);
        println!("{}: {} requests", workload.name, workload.requests());
        let mut runs = Vec::new();
        for row in Row::all(MAX_RUNNING) {
            if row.name.contains(&options.only) {
                let start = Instant::now();
                let outcome = play(&workload, &fleet, &row);
                print(&row, &outcome, start.elapsed().as_secs_f64());
                runs.push((row, outcome));
            }
        }
        let title = title(&workload, options.trace.is_some(), options.speed);
        text.push_str(&report::table(&title, &workload, &runs));
        text.push_str(&report::turns(&runs));
    }
    match &options.write {
        Some(path) => report::write(path, "policies", text.trim_end()),
        None => Ok(()),
    }
}

fn title(workload: &Workload, is_recorded: bool, speed: f64) -> String {
    let count = workload.requests();
    let minutes = workload.sessions.last().map_or(0.0, |one| one.at_us as f64 / 6e7);
    let clients = workload.clients.len();
    let kind = if is_recorded { "recorded" } else { "generated" };
    match workload.name.as_str() {
        "tenants" => format!(
            "Tenants (generated): {count} requests in {minutes:.1} minutes by {clients} clients, four of which flood:"
        ),
        _ => format!(
            "Conversations ({kind}, {speed} times as fast): {count} requests in {minutes:.1} minutes, {clients} conversations:"
        ),
    }
}

fn print(row: &Row, outcome: &Outcome, took_s: f64) {
    println!(
        "{:42} hit {:.3} of best {:.3} ttft p50 {:7.0} p99 {:7.0} light {:7.0} {:7.0} gap {:5.1} {:5.1} spread {:.2} {:.2} jain {:.3} tok/s {:7.0} work/s {:7.0} end {:5.1} preempted {} busy {:.2} ({took_s:.1} s)",
        row.name,
        outcome.hit_rate(),
        outcome.of_best(),
        outcome.ttft_ms(0.5, false),
        outcome.ttft_ms(0.99, false),
        outcome.ttft_ms(0.5, true),
        outcome.ttft_ms(0.99, true),
        outcome.gap_ms(0.5),
        outcome.gap_ms(0.99),
        outcome.spread(|totals| totals.prefilled),
        outcome.spread(|totals| totals.requests),
        outcome.jain(),
        outcome.tokens_per_s(),
        outcome.work_per_s(),
        outcome.makespan_s(),
        outcome.preemptions(),
        outcome.utilization(),
    );
}
