"""Each known class of cheats has at least four files in candidates/, all of which must be caught.

The classes are those of public reports about benchmarks of kernels that were fooled.
"""

from __future__ import annotations

import pytest

from tests.judge.all_candidates import candidates

CLASSES = {
    "side stream": "side_stream side_stream_in_backward side_stream_starts_early late_by_event "
    "corrected_later patched_streams",
    "background thread or process": "background_thread background_process forked_writer "
    "future_result thread_finishes_last_rows timer_fills_result launched_by_thread ipc_writer",
    "lazy tensor": "lazy_subclass lazy_by_dispatch lazy_instance_method lazy_until_used "
    "lazy_equal_class lazy_resized_storage",
    "patched timer, comparison or norm": "patched_timer patched_allclose patched_norm "
    "patched_sum patched_events patched_synchronize patched_within_a_call",
    "forged result or exit": "forged_answer forged_complete_answer forged_error exit_zero "
    "exit_by_handler execs_true ends_while_timed forged_huge_answer",
    "call counting": "counts_calls counts_modes counts_backwards every_fifth_call "
    "counts_seventy_calls every_fifth_backward counts_seconds",
    "frames and collector": "reads_frames searches_collector tracebacks searches_memory "
    "traces_the_launcher reads_parents_memory",
    "impossible time": "answers_before_it_works wakes_itself waits_for_inputs forged_device_time "
    "work_before_the_clock",
    "cache": "cached_by_pointer cached_by_identity cached_by_shape cached_by_version "
    "cached_by_seed cached_by_first_value cached_by_content gradient_of_first_loss",
    "stale memory": "stale_memory stale_statistics keeps_fresh_memory quiet_allocator freed_block",
    "graph on stale pointers": "graph_of_first_input graph_with_old_weights recorded_pointers "
    "graph_with_one_output weights_by_pointer",
    "replay from a file": "replay_file replay_by_content replay_descriptor replay_environment "
    "replay_shared_memory",
    "mutation": "writes_input writes_weights rounds_weights backward_writes_input "
    "writes_incoming_gradient replaces_weights",
    "aliasing": "shares_input returns_view_of_weight one_workspace one_result_for_equal_inputs "
    "result_in_weights_memory copy_shares_weights",
    "zeros, constants, small parts": "zeros zero_row zero_channel zero_small_rows mean_value "
    "last_column_guessed norm_never_zero",
    "lower precision": "half_precision_sum bfloat16_matmul cut_mantissa two_bfloat16_parts "
    "half_backward lower_precision_products half_products_on_gpu",
    "fitted shapes and ranges": "fixed_rows fixed_half fitted_range fitted_middle clamped_inputs "
    "only_positive wrong_beyond_double",
    "frozen weights": "weights_at_construction weights_at_first_call packed_by_mode "
    "packed_by_first_element loaded_weights_not_packed folded_statistics wrong_after_pickling",
    "skipped by mode": "skipped_in_eval skipped_without_gradients skipped_in_inference_mode "
    "dropout_skipped eval_is_train",
    "missing or wrong gradients": "no_backward scalar_as_number gradient_for_ones "
    "wrong_input_gradient detached_with_gradient clipped_gradient",
    "unwritten or out of bounds": "unwritten_rows reads_beyond writes_beyond writes_before_weights "
    "reads_before_weights writes_behind_result reads_freed_memory",
    "global state": "default_dtype flushes_denormals gradients_off precision_by_flag "
    "seeds_python leaves_half_accumulation working_folder",
    "NaN as a wildcard": "all_nan nan_on_purpose nan_in_gradients nan_for_infinity nan_dropped",
    "degenerate task": "degenerate_zeros degenerate_after_first degenerate_in_training "
    "cached_by_shape",
    "harness overwritten": "replaces_launcher replaces_modules rewrites_code "
    "writes_own_memory writes_all_mappings patched_isinstance",
}
# These are no fault of a file, and give flags.
FLAGGED = {
    "fallback to the original": "falls_back kernel_never_runs decorated_original tries_its_kernel",
    "degenerate task": "degenerate_by_sum",
}
EVERY = {each.path.stem: each for kind in ("cpu", "cuda") for each in candidates(kind)}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_four_exploits(name: str) -> None:
    stems = CLASSES[name].split()
    assert len(set(stems)) == len(stems) >= 4
    assert not [each for each in stems if each not in EVERY or EVERY[each].honest]


@pytest.mark.parametrize("name", FLAGGED)
def test_files_that_are_no_fault_are_flagged(name: str) -> None:
    assert all(EVERY[each].flags for each in FLAGGED[name].split())


def test_there_are_twenty_honest_files_of_many_styles() -> None:
    flagged = {stem for stems in FLAGGED.values() for stem in stems.split()}
    honest = {stem for stem, each in EVERY.items() if each.honest} - flagged
    wanted = "autograd_function load_inline triton_kernel cuda_graph workspace joined_threads"
    assert len(honest) >= 20
    assert set(wanted.split()) | {"packed_by_version", "compiled_by_torch"} <= honest
