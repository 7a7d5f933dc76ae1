//! Tests of the CUDA backend on a GPU. GPU machines often have no toolchain, so this is one
//! self-contained program: `make test-gpu` builds it, and environment variables name its inputs.
//!
//! | variable | meaning and default |
//! | --- | --- |
//! | `BATON_TEST_KERNELS` | path of the kernel library |
//! | `BATON_TEST_NCCL` | path of the NCCL library; default: the loader's search path |
//! | `BATON_TEST_MODEL` | SmolLM2 as GGUF |
//! | `BATON_TEST_CONFIG` | `config.json` of a model whose steps are timed |
//! | `BATON_TEST_REFERENCE` | the folder that `gpu/transformers_reference.py` wrote on this GPU |
//! | `BATON_TEST_BINARIES` | the folder of `baton` and the services, for cluster tests |
//! | `BATON_TEST_CLUSTERS` | `cpu`: run fewer cluster tests, on CPUs |
//! | `BATON_TEST_MIXES` | number of random request mixes; default 200 |
//! | `BATON_TEST_TRANSFERS` | transfers per transport in the random abort test; default 400 |
//! | `BATON_TEST_SOAK_SECONDS` | duration of the soak test of all-reduce and KV transfers; default
//! 5 |
//! | `BATON_TEST_SHORT` | `1`: few rounds, for a run under compute-sanitizer |
//! | `BATON_TEST_GPU` | `N`: a test that needs at most N GPUs fails instead of being skipped |
//!
//! A test that needs more than this machine has is skipped with a reason and counted as ignored.

use std::process::ExitCode;

use test_harness::tests;

mod gpu {
    pub(crate) mod attention;
    pub(crate) mod bench;
    pub(crate) mod clusters;
    pub(crate) mod collective;
    pub(crate) mod delta;
    pub(crate) mod digest;
    pub(crate) mod executor;
    pub(crate) mod experts;
    pub(crate) mod fault;
    pub(crate) mod fp8;
    pub(crate) mod golden;
    pub(crate) mod graphs;
    pub(crate) mod int4;
    pub(crate) mod links;
    pub(crate) mod load;
    pub(crate) mod low_rank;
    pub(crate) mod mixes;
    pub(crate) mod model;
    pub(crate) mod moves;
    pub(crate) mod mxfp4;
    pub(crate) mod nccl;
    pub(crate) mod nodes;
    pub(crate) mod offload;
    pub(crate) mod ranks;
    pub(crate) mod reference;
    pub(crate) mod rows;
    pub(crate) mod sampling;
    pub(crate) mod soak;
    pub(crate) mod speculation;
    pub(crate) mod start;
    pub(crate) mod tp;
    pub(crate) mod values;
    pub(crate) mod weights;
}

fn main() -> ExitCode {
    test_harness::main(
        &[
            (gpu::nodes::PEER_HELPER, gpu::nodes::run_peer),
            (gpu::tp::RANK_HELPER, gpu::tp::run_rank_process),
        ],
        tests![
            gpu::attention::plain_attention_matches_cpu_for_every_group_and_head_dim,
            gpu::attention::auto_selected_attention_matches_cpu,
            gpu::attention::sliding_window_masks_earlier_tokens,
            gpu::attention::attention_of_draft_tokens_matches_cpu,
            gpu::attention::attention_sinks_match_cpu,
            gpu::attention::oversized_step_is_rejected_before_any_launch,
            gpu::clusters::prefill_and_decode_on_one_gpu_match_a_single_node,
            gpu::clusters::prefill_and_decode_on_two_gpus_match_by_every_transport,
            gpu::clusters::tp_nodes_on_two_gpus_match_a_single_node,
            gpu::clusters::two_prefill_and_two_decode_nodes_match_a_single_node,
            gpu::clusters::tp_nodes_on_four_gpus_match_a_single_node,
            gpu::clusters::adapters::pair_on_one_gpu_computes_adapters_loaded_while_it_serves,
            gpu::clusters::adapters::tp_nodes_on_two_gpus_compute_adapters,
            gpu::clusters::disturbed::killed_nodes_change_no_answer,
            gpu::clusters::disturbed::killed_rank_ends_only_its_node_which_recovers,
            gpu::clusters::disturbed::drained_nodes_under_load_change_no_answer,
            gpu::clusters::driver_calls::engine_thread_never_waits_for_the_driver_during_saves_and_loads,
            gpu::clusters::tiers::kv_loaded_from_tiers_on_one_gpu_is_bit_identical,
            gpu::clusters::tiers::kv_loaded_from_tiers_on_two_ranks_is_bit_identical,
            gpu::collective::all_reduce_of_two_ranks_is_identical_on_both,
            gpu::collective::all_reduce_of_four_ranks_is_identical_on_all,
            gpu::collective::two_ranks_all_gather_rows,
            gpu::collective::four_ranks_all_gather_rows,
            gpu::collective::backend_of_two_ranks_adds_all_reduce_to_residual,
            gpu::collective::backend_of_four_ranks_adds_all_reduce_to_residual,
            gpu::collective::missing_rank_times_out_and_the_group_restarts,
            gpu::collective::abort_and_group_shutdown_end_an_all_reduce_at_once,
            gpu::collective::killed_rank_is_detected_and_the_gpu_stays_usable,
            gpu::collective::mismatched_ipc_handles_are_rejected_by_rank,
            gpu::delta::linear_attention_matches_cpu_for_any_shape_and_chunk,
            gpu::delta::output_gate_matches_cpu,
            gpu::delta::copies_of_blocks_run_in_order,
            gpu::delta::linear_attention_time_is_reported,
            gpu::delta::cached_and_reused_states_match_cpu_tokens,
            gpu::delta::free_blocks_of_states_are_never_read,
            gpu::digest::block_digests_match_cpu_for_any_layout_and_rank_count,
            gpu::digest::digests_of_several_threads_match_cpu,
            gpu::digest::digests_after_a_rejected_call_match_cpu,
            gpu::digest::weight_digests_match_cpu_and_count_values_that_are_not_finite,
            gpu::digest::digest_bandwidth_is_reported,
            gpu::offload::blocks_return_from_host_memory_for_any_layout_and_rank_count,
            gpu::offload::offload_bandwidth_is_reported,
            gpu::executor::request_mixes_match_cpu_tokens_with_one_and_two_steps_in_flight,
            gpu::executor::rules_and_prompt_logprobs_match_cpu_with_steps_in_flight,
            gpu::executor::released_blocks_are_poisoned_and_never_read,
            gpu::executor::pooled_values_match_cpu_among_other_rows,
            gpu::executor::wait_for_token_bitmasks_is_no_busy_time,
            gpu::executor::step_synchronises_with_the_gpu_once,
            gpu::executor::step_records_contain_gpu_start_and_end,
            gpu::experts::mixtures_of_any_size_and_rows_match_cpu,
            gpu::experts::equal_rows_and_equal_logits_match_cpu,
            gpu::experts::a_row_has_the_bits_that_it_has_alone,
            gpu::experts::chosen_experts_and_weights_match_cpu,
            gpu::mxfp4::mixtures_of_any_size_and_rows_match_cpu,
            gpu::mxfp4::equal_rows_and_equal_logits_match_cpu,
            gpu::mxfp4::a_row_has_the_bits_that_it_has_alone,
            gpu::mxfp4::least_and_greatest_scales_are_exact,
            gpu::golden::smollm2_generates_the_golden_tokens_in_f32,
            gpu::golden::smollm2_in_bf16_predicts_every_certain_golden_token,
            gpu::golden::smollm2_cluster_on_a_gpu_generates_the_golden_tokens_in_f32,
            gpu::fault::gpu_fault_stops_the_executor_with_its_cause,
            gpu::fault::gpu_fault_fails_the_nodes_requests_and_exits_with_1,
            gpu::fp8::gemms_match_sums_of_the_stored_numbers,
            gpu::fp8::fused_operations_match_cpu,
            gpu::fp8::models_in_fp8_are_close_to_bf16_with_and_without_graphs,
            gpu::int4::gemms_match_sums_of_the_stored_numbers,
            gpu::int4::fused_operations_match_cpu,
            gpu::int4::updated_weights_match_a_new_backend,
            gpu::int4::models_in_int4_match_the_dequantised_model_with_and_without_graphs,
            gpu::graphs::graph_replay_without_its_memory_is_detected,
            gpu::graphs::graph_replay_on_reused_memory_is_detected,
            gpu::low_rank::gemms_with_updates_match_cpu_for_any_size_and_rows,
            gpu::low_rank::steps_of_several_adapters_match_cpu_with_and_without_graphs,
            gpu::low_rank::adapters_are_replaced_while_steps_of_others_run,
            gpu::links::kv_transfer_between_processes_preserves_kv_in_any_block_order,
            gpu::links::nccl_between_hosts_preserves_kv_and_fails_with_its_peer,
            gpu::links::unusable_nccl_environment_falls_back_to_tcp,
            gpu::links::abort_at_any_time_leaks_no_block,
            gpu::links::killed_sender_fails_only_its_own_transfers,
            gpu::links::nodes_in_one_process_fall_back_to_tcp_and_count_it,
            gpu::links::stopped_peer_delays_no_other_pair_and_frees_blocks_after_the_lease,
            gpu::links::peers_stopped_or_killed_together_delay_no_other_pair,
            gpu::links::teardown_or_setup_with_a_stopped_peer_delays_no_other_pair,
            gpu::links::peer_stopped_during_setup_delays_no_other_pair,
            gpu::links::random_aborts_from_either_side_leave_other_transfers_intact,
            gpu::links::delayed_streams_and_gather_kernels_preserve_kv,
            gpu::links::nccl_transfer_between_tp_ranks_preserves_kv,
            gpu::links::ranks_with_common_heads_find_different_gpus,
            gpu::links::ranks_sharing_a_gpu_with_their_sender_fall_back_to_another_transport,
            gpu::load::weight_rows_of_any_matrix_size_load_correctly,
            gpu::load::kv_cache_fits_the_memory_share,
            gpu::load::tuned_gemm_matches_untuned_and_is_timed_once,
            gpu::load::invalid_gemm_algorithm_is_not_used,
            gpu::mixes::random_request_mixes_give_equal_tokens_in_every_configuration,
            gpu::mixes::randomly_delayed_streams_change_no_token,
            gpu::mixes::margin_check_separates_close_from_clear_choices,
            gpu::model::every_architecture_matches_cpu_logits_and_tokens,
            gpu::model::fused_kernels_and_graph_replay_match_cpu_logits_in_bf16,
            gpu::moves::gather_and_scatter_of_heads_match_cpu,
            gpu::nccl::two_ranks_send_receive_and_all_reduce,
            gpu::nccl::absent_rank_times_out,
            gpu::nccl::killed_peer_is_aborted_and_its_memory_freed,
            gpu::reference::random_models_match_logits_of_transformers,
            gpu::rows::norms_match_cpu,
            gpu::rows::activations_match_cpu,
            gpu::rows::gemm_matches_cpu_for_both_output_types,
            gpu::sampling::sampled_tokens_match_cpu,
            gpu::sampling::non_finite_logits_fail_only_their_row,
            gpu::sampling::two_ranks_sample_the_tokens_of_one_gpu,
            gpu::sampling::four_ranks_sample_the_tokens_of_one_gpu,
            gpu::sampling::missing_rank_in_sampling_times_out,
            gpu::sampling::sampling_latency_of_two_ranks_is_reported,
            gpu::soak::all_reduce_during_kv_transfers_never_stalls,
            gpu::speculation::draft_tokens_and_their_acceptance_match_the_cpu,
            gpu::speculation::request_mixes_with_draft_tokens_match_cpu_tokens,
            gpu::speculation::cost_of_draft_tokens_is_reported,
            gpu::start::out_of_memory_names_requested_and_free_bytes,
            gpu::start::dropped_memory_is_freed,
            gpu::start::weight_format_without_kernels_is_rejected,
            gpu::start::event_orders_a_write_before_a_read_on_another_stream,
            gpu::tp::two_ranks_generate_the_tokens_of_one,
            gpu::tp::four_ranks_generate_the_tokens_of_one,
            gpu::tp::killed_rank_ends_its_group_and_the_next_group_serves,
            gpu::tp::kv_moves_between_any_two_rank_counts,
            gpu::values::cost_of_prompt_logprobs_pooling_and_rules_is_reported,
            gpu::weights::updated_weights_under_captured_graphs_match_a_new_executor,
            gpu::weights::updated_weights_of_two_ranks_match_a_new_group,
        ],
    )
}
