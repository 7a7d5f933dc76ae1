//! Transfers over real sockets on loopback.

mod firewall;
mod hostile;
mod mismatch;
mod node;
mod process;
mod stopped;
mod tls;
mod transfers;
mod transports;

fn main() -> std::process::ExitCode {
    let tests = test_harness::tests![
        firewall::dropped_data_port_fails_only_its_pair_after_a_lease,
        firewall::lost_connection_fails_a_transfer_after_done,
        hostile::garbage_on_both_ports_disturbs_no_transfer,
        hostile::zap_blocks_frames_of_unauthenticated_peers,
        hostile::recorded_credential_is_rejected,
        hostile::zap_credential_does_not_replace_message_tags,
        hostile::data_connections_authenticate_and_write_only_posted_blocks,
        hostile::group_of_connections_is_bounded_and_ends_when_a_newer_group_begins,
        hostile::connection_by_a_transport_that_was_not_offered_is_refused,
        hostile::incomplete_handshakes_time_out_and_free_their_slots,
        mismatch::mismatched_nodes_reject_each_other_and_still_serve_matching_nodes,
        stopped::stopped_peer_delays_no_other_pair_and_times_out_after_a_lease,
        stopped::killed_peer_is_detected_at_once,
        tls::tcp_speaks_tls_and_preserves_contiguous_and_scattered_blocks,
        tls::auto_uses_tcp_between_hosts_with_certificates_and_rdma_adapters,
        tls::only_nodes_with_certificates_of_one_cluster_exchange_kv,
        transfers::blocks_arrive_unchanged_in_several_chunks,
        transfers::tcp_copies_device_blocks_through_host_memory,
        transfers::many_transfers_share_a_pair_in_both_directions,
        transfers::abort_on_either_side_releases_both_at_once,
        transfers::different_model_is_rejected_with_both_fingerprints,
        transfers::wrong_cluster_secret_is_rejected_by_zap,
        transfers::unreachable_peer_fails_after_one_lease,
        transfers::peer_shutdown_is_detected_at_once,
        transfers::shutdown_joins_all_threads_and_is_idempotent,
        transfers::invalid_endpoint_fails_the_transfer_at_once,
        transfers::port_in_use_is_named_and_all_ports_are_released,
        transfers::blocked_event_sink_rejects_commands_and_loses_no_event,
        transfers::metrics_are_readable_while_the_driver_is_blocked,
        transports::every_transport_preserves_contiguous_and_scattered_blocks,
        transports::abort_at_any_moment_releases_all_blocks,
        transports::leaving_peer_releases_the_blocks_of_the_other_side,
        transports::transport_follows_the_settings_of_both_nodes,
        transports::auto_uses_nccl_between_hosts_if_its_probe_is_fast,
        transports::unreachable_memory_falls_back_to_tcp_and_is_counted,
        transports::failed_transport_falls_back_to_the_next_common_one_before_tcp,
        transports::unusable_transport_counts_as_no_fallback,
        transports::peer_lost_while_joining_counts_as_no_fallback,
        transports::failed_join_is_reported_to_the_waiting_peer,
        transports::nodes_connect_before_the_first_transfer,
        transports::connect_guard_is_dropped_if_the_peer_does_not_answer,
        transports::connecting_in_advance_creates_no_tcp_pair,
        transports::preconnected_pairs_are_bounded,
        transports::blocks_stay_held_while_a_copy_is_in_flight,
        transports::hung_copy_fails_after_a_lease_and_delays_no_other_pair,
        transports::nccl_operation_without_its_peer_is_aborted,
        transports::nccl_operations_in_flight_are_bounded,
        transports::corruption_is_detected_if_either_side_verifies,
    ];
    test_harness::main(
        &[
            (firewall::FIREWALL_HELPER, firewall::run_behind_firewall),
            (firewall::LOST_CONNECTION_HELPER, firewall::run_with_lost_connection),
            (process::CHILD_HELPER, process::run_child),
        ],
        tests,
    )
}
