//! Faults of a real network and of real processes: links that are cut or lose packets, processes
//! that are stopped or killed, a full disk, too few open files. Every answer is compared with the
//! answer of the run without a fault.
//!
//! Hosts are network namespaces. A test creates them, and then runs itself as a helper process in
//! the namespace of the network's router. Without root, `ip` or `nft` the tests of the network are
//! skipped.
//!
//! `BATON_FAULTS=links,stops,kills cargo test -p integration-tests --test faults -- --nocapture`
//! also runs the long tables of docs/benchmarks/faults.md. `BATON_FAULTS_SIZES=2` limits the tables
//! of links and stops to 2P2D.

mod hosts;
mod kills;
mod links;
mod load;
mod network;
mod resources;

use std::process::ExitCode;

/// Environment variable: the long tables to run, separated by commas.
const LONG: &str = "BATON_FAULTS";

fn main() -> ExitCode {
    let mut tests = test_harness::tests![links::cut_and_stopped_hosts_change_no_answer];
    tests.extend(test_harness::multi_thread_tests![
        kills::requests_finish_when_the_only_decode_node_is_back,
        resources::full_disk_of_the_log_disturbs_no_request,
        resources::full_disk_of_the_log_of_a_node_disturbs_no_request,
        resources::limit_of_open_files_rejects_connections_and_recovers,
        resources::limit_of_open_files_of_a_node_disturbs_no_request_in_flight,
        resources::node_whose_disk_tier_is_read_only_serves_without_it,
    ]);
    let wanted = std::env::var(LONG).unwrap_or_default();
    for name in wanted.split(',').filter(|name| !name.is_empty()) {
        tests.extend(match name {
            "links" => test_harness::tests![links::every_link_cut_for_every_time],
            "stops" => test_harness::tests![links::every_process_stopped],
            "kills" => test_harness::multi_thread_tests![
                kills::one_decode_node_killed_twenty_times,
                kills::hundred_streams_while_a_decode_node_is_killed_twenty_times,
                kills::only_decode_node_killed_five_times,
                kills::nodes_killed_every_few_seconds,
            ],
            other => panic!("invalid {LONG}: {other}; expected links, stops or kills"),
        });
    }
    let helpers = [
        (links::SHORT, links::run_short as fn()),
        (links::LINKS, links::run_links),
        (links::STOPS, links::run_stops),
    ];
    test_harness::main(&helpers, tests)
}
