"""What `make test` leaves to `make explore`: tests that repeat, at length, what a shorter one of the same part shows,
and some that take seconds each, to compile or to start a process.

Each has the marker `explore`; `pytest FILE` runs it, and CI runs all. A test function is marked whole (0), but for some
of its parameters' ids, or but for one in so many of them, chosen by a hash of the id.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import pytest

Kept = int | tuple[str, ...]

EXPLORED: dict[str, dict[str, Kept]] = {
    "test_compile.py": {
        "test_statistics_in_compiled_code": ("with gradients-statistics",),
        "test_every_score_and_mask": ("ScoreFunction-Causal", "Gaussian-None"),
        "test_gradients_of_every_score_and_of_every_part_of_a_mask": ("Dot-And",),
        "test_every_bias": ("RelativeBias",),
        "test_masks_made_inside_compiled_code": ("True-padding",),
        "test_alignments_in_compiled_code": ("2",),
        "test_inductor": 0,
        "test_export": ("True-False",),
        "test_opcheck": 0,
        "test_autocast_in_compiled_code": ("None",),
        "test_a_number_that_changes_between_calls_of_compiled_code": ("None-scale",),
        "test_numbers_of_a_score_that_was_made_outside_of_compiled_code": 0,
    },
    "test_export.py": {
        "test_weights_at_fixed_sizes": 0,
    },
    "test_mode.py": {
        "test_a_backward_pass_in_another_mode": (
            "eager-native",
            "compiled-native",
            "autocast-function",
            "beside duals-tiled",
            "counted-sdpa",
        ),
        "test_a_lazy_matrix_that_is_read_in_another_mode": ("eager-native", "autocast-function", "beside duals-native"),
        "test_a_break_of_the_graph": ("inside",),
    },
    "test_called_again.py": {
        "test_surroundings": ("autocast", "func", "losses", "thread"),
    },
    "test_hooks.py": {
        "test_hooks_in_compiled_code": 0,
        "test_two_steps_of_training_are_those_of_a_module_that_is_called": (
            "bilinear-weight_norm",
            "own-spectral_norm",
            "relative-prune",
        ),
    },
    "test_bytes_of_masks.py": {
        "test_compiled": ("aot_eager",),
    },
    "test_hidden_pairs.py": {
        "test_in_compiled_code": ("dot",),
        "test_a_row_of_nan_reaches_nothing_that_it_does_not_see": 12,
    },
    "test_contract.py": {
        "test_every_engine_equals_the_reference": 12,
        "test_every_engine_equals_the_reference_on_long_sequences": 4,
        "test_engine": 0,  # every pair of score and mask is drawn from above
        "test_many_small_blocks": 4,
        "test_second_derivatives_over_many_blocks": ("Dot",),
        "test_lazy_weights": 4,
        "test_precision_within_the_budget_of_eager_code": 16,
        "test_derivatives_with_all_there_is": ("tiled",),
    },
    "test_fake_cuda.py": {
        "test_the_host_waits_only_where_it_is_said": 0,
        "test_the_engines_for_any_device_need_no_float64": 0,
        "test_each_operation_of_the_engines_for_any_device_has_a_kernel_for_mps": 0,
        "test_the_device_sees_what_would_wait": 0,
        "test_the_kernels_of_flex_compile_for_a_gpu_that_is_not_here": 0,
        "test_calls_of_triton_wait_for_nothing_up_to_their_kernels": 0,  # the device is compiled for these
        "test_a_call_of_triton_is_few_operations_beside_its_kernels": 0,
        "test_tensors_without_values_give_shapes_and_start_no_kernel": 0,
        "test_while_a_graph_is_captured_nothing_is_proved_compiled_or_kept": 0,
    },
    "test_borders.py": {
        "test_transforms_in_a_fresh_process": 0,
        "test_distributed_tensors_are_served_or_refused_in_words": 0,
        "test_batched_gradients": 6,
        "test_a_checkpoint_frees_the_operands": 3,
        "test_compiled_code_holds_for_every_length": 0,
        "test_derivatives_inside_compiled_code": 0,
    },
    "test_cli.py": {
        "test_nothing_of_transformers_is_seen": 0,
        "test_a_signal_at_any_import_is_one_line_and_an_end_by_that_signal": ("2",),
        "test_an_output_that_takes_nothing": 3,
        "test_a_broken_folder_is_one_line_and_status_2": 3,
        "test_a_reader_that_has_gone": ("plain",),
        "test_a_signal_in_a_write_leaves_the_old_file_alone": 0,
    },
    "test_triton.py": {
        "test_planted_faults": 0,  # those of the sample, with the kernels beside them
        "test_all_of_the_kernels": 0,
        "test_no_random_problem_is_beyond_its_budget": 0,
    },
    "interpreted/compared.py": {
        "test_every_mask": ("gaps-(7, 63)-tanh_add",),
        "test_every_bias": 0,
        "test_sinks_dropout_and_softcap": ("mul",),
        "test_low_precision": ("torch.bfloat16-mul",),
        "test_any_size_of_number": ("1000.0-tanh_add",),
        "test_what_is_not_finite": ("mul",),
        "test_what_no_query_sees_may_hold_anything": ("3.4028234663852886e+38-sq_diff", "nan-mul"),
        "test_a_problem_that_is_guarded_before_keeps_its_poison": ("mul",),
        "test_statistics": ("none-mul",),
        "test_gradients_of_statistics": 0,
        "test_decoding_shares_out_the_keys": ("True-mul",),
        "test_a_key_is_read_once_for_the_heads_of_its_group": ("gaps by head, sinks-1",),
        "test_the_proof_of_a_device_passes": 0,
        "test_the_bits_do_not_change_from_run_to_run": 0,
    },
    "test_biases.py": {"test_a_function_is_the_bias_that_it_writes_out": ("False",)},
    "test_checked.py": {
        "test_what_an_edit_gives_back_is_checked": 3,
        "test_malformed_problems_are_refused_or_right": ("0",),
    },
    "test_bad_input.py": {"test_a_right_answer_or_one_clear_error": ("160",)},
    "test_docs_check.py": {
        "test_a_site_without_a_fault": 0,
        "test_each_planted_fault_is_found": 0,
    },
    "test_empty.py": {"test_whatever_is_asked": ("0",)},
    "test_forward_mode.py": {"test_tangents_and_gradients": 12},
    "test_freed.py": {"test_what_is_freed_between_forward_and_backward_is_an_error_in_words": ("0-10",)},
    "test_partial.py": {
        "test_in_compiled_code": 4,
        "test_second_derivatives": 0,
    },
    "test_private_parts.py": {"test_without_a_name_the_numbers_are_the_same_or_an_error_says_so": ("all",)},
    "test_reprs.py": {
        "test_random_reprs": ("none-none", "double-double"),
        "test_compiled_code_may_print": 0,
    },
    "test_semantics.py": {
        "test_second_derivatives_at_any_size_on_every_engine": 8,
    },
    "test_transforms.py": {
        "test_random_transforms_of_random_calls": ("0-8",),
        "test_a_linear_map_is_the_same_at_each_use": 0,
    },
    "test_written.py": {"test_a_disk_that_is_full_at_any_byte_leaves_the_old_file": 0},
    "test_fuzz.py": {"test_no_problem_is_beyond_its_budget": ("0-20",), "test_a_wrong_engine_is_found": 0},
    "test_rules_kept.py": {"test_each_change_is_followed": 3},
    "test_flex.py": {
        "test_masks": ("Or", "MaskFunction"),
        "test_masks_that_are_expressions": ("rule of heads",),
        "test_rules_go_into_the_kernel": ("joined",),
        "test_a_learnt_bias": ("(1, 4, 150, 290)",),
        "test_partial_results_in_compiled_code": 0,
        "test_the_proof_of_a_device_passes": 0,
        "test_other_widths_and_a_scale": 0,
        "test_a_bias_that_is_a_view_has_its_gradient": 0,
        "test_a_row_of_a_bias_as_low_as_a_mask_of_finfo_min": 0,
    },
    "test_fuzz_edited_models.py": {
        "test_random_edits_are_as_by_hand": 12,
        "test_every_kind_is_drawn": 0,
    },
    "test_masks_written_to.py": {"test_what_it_says_now_holds": 3},
    "test_fuzz_edits.py": {
        "test_random_edits_are_as_by_hand": ("0",),
        "test_every_kind_is_drawn": 0,
    },
    "test_guard_pages.py": {"test_kernels_stay_inside_their_buffers": ("some",)},
    "test_native.py": {
        "test_compiled_code_runs_the_forward_pass_once": 3,
        "test_every_instruction_set": 2,
        "test_looks_at_ties_and_at_parts": 2,
    },
    "test_native_in_low_precision.py": {"test_results_are_those_of_float32_copies": 2},
    "test_regressions.py": {
        "test_a_change_between_forward_and_backward_is_an_error_and_no_wrong_gradient": ("mask-tiled", "key-sdpa")
    },
    "audits/test_architectures.py": {"test_a_sample": ("bert", "gpt_oss", "llama", "mobilebert")},
    "audits/test_planted.py": {
        "test_a_planted_fault_is_found_and_its_healthy_twin_is_ok": 2,
        "test_the_layer_and_head_are_named": ("0-3", "1-0", "1-5", "2-2", "3-1", "3-4"),
    },
    "models/test_monitor.py": {
        "test_inductor": 0,
        "test_compiled_code_says_the_same": ("llama-model.compile",),
        "test_compiled_code_writes_masks_over_each_other": 0,
        "test_compiled_padding_and_backends": 0,
        "test_when_it_is_removed_no_frame_of_clearheads_is_entered": ("False",),
        "test_a_model_that_is_compiled_already_is_an_error": 0,
        "test_a_compiled_function_that_calls_the_model": 0,
        "test_modules_of_clearheads_are_seen_in_compiled_code": (
            "cross-aot_eager",
            "called twice-eager",
            "sinks-eager",
        ),
    },
    "models/test_compiled_functions.py": {
        "test_each_call_is_recorded": ("sdpa-False",),
        "test_each_call_is_recorded_in_threads": 0,
        "test_a_model_of_transformers_run_by_a_compiled_function": 0,
        "test_the_first_that_a_process_compiles": 0,
    },
    "models/test_backends.py": {
        "test_a_keyword_that_a_backend_drops_is_not_recorded": 3,
        "test_what_each_backend_does_without_a_mask_and_with_one": 2,
    },
    "models/test_causes.py": {"test_circuits_of_a_recording_are_those_of_the_model": 3},
    "models/test_compare.py": {"test_good_backends_compute_their_formula": 3},
    "models/test_differences.py": {"test_two_checkpoints_differ_as_their_eager_weights": 3},
    "models/test_edit.py": {
        "test_positions_are_absolute_in_generations": 3,
    },
    "models/test_joined.py": {
        "test_joined_steps_are_a_full_forward": 3,
        "test_a_cache_whose_keys_change_places_through_data": ("signs-None", "sequences-4", "two numbers-4"),
    },
    "models/test_own_attention.py": {"test_one_call_one_record": 3},
    "models/test_run_on_clearhead.py": {"test_a_compiled_model": 0},
    "models/test_cross_padding.py": {"test_it_is_found": 3},
    "models/test_edits_by_hand.py": {
        "test_an_edit_is_what_it_is_by_hand": 16,
        "test_estimates_of_small_edits_are_their_effects": ("Llama", "GptOss", "Bart", "ViT"),
    },
    "models/test_attribution.py": {
        "test_the_parts_of_an_edited_run": 4,
        "test_several_answers_are_those_one_by_one": 3,
    },
    "models/test_attribution_patching.py": {
        "test_it_is_the_gradient_times_the_change": ("Llama-query", "Llama-value", "GPT2-weights", "Bert-output")
    },
    "models/test_edited_modules.py": {"test_torchs_module_and_its_drop_in": 6},
    "models/test_explain.py": {"test_every_step_is_what_the_model_computed": 12},
    "models/test_interrupted.py": {"test_an_interrupt_at_any_line_leaves_nothing": 0},
    "models/test_keywords.py": {"test_every_keyword_that_a_model_passes_is_known": 0},
    "models/test_heads.py": {
        "test_long_texts_take_memory_of_their_length": 0,
        "test_in_float64_they_are_exact": ("causal",),
    },
    "models/test_origin.py": {
        "test_every_side_and_the_result_of_each_architecture": 6,
        "test_layouts_and_norms": 3,
        "test_rotations_and_factors": 3,
    },
    "models/test_own_modules.py": {"test_a_thousand_forwards_keep_nothing": 0},
    "models/test_padding.py": {"test_the_report_leaves_padding_out": ("20-right",)},
    "models/test_selected_keys.py": {"test_the_chosen_keys_alone": 3},
    "models/test_stored_damage.py": {"test_random_changes_are_refused_in_words_or_harmless": 0},
    "models/test_torch_nn.py": {
        "test_multihead_attention": 3,
        "test_transformer_encoder": 3,
    },
    "models/test_watch.py": {
        "test_torchs_own_function_is_seen_below_a_wrapper_that_was_there_before_the_first_watch": 0
    },
    "models/test_widget.py": {"test_in_jupyterlab": 0},
    "nn/test_cache_owner.py": {
        "test_one_cache_for_the_layers_of_compiled_code_is_refused": 0,
        "test_the_number_of_a_copy_is_that_of_another_process": 0,
    },
    "nn/test_compiled_decoding.py": {
        "test_inductor": 0,
        "test_a_model_of_several_layers": ("window",),
        "test_a_model_of_several_layers_under_inductor": 0,
        "test_through_autograds_compiler": 0,
        "test_with_gradients": 0,
        "test_each_step_is_that_of_eager_code": ("4",),
        "test_what_eager_code_recorded_is_still_right_after_compiled_steps": 0,
    },
    "nn/test_continuous_batches.py": {"test_each_sequence_is_what_it_is_alone": 3},
    "nn/test_key_value_cache.py": {"test_a_cache_that_is_made_in_exported_code": ("traced",)},
    "nn/test_rules_beside_a_cache.py": {"test_compiled_steps": 0},
    "nn/test_module_options.py": {
        "test_compiled_whole": 0,
        "test_forward_gradients_and_weights": 3,
        "test_scaled_rotary_in_a_module_by_offset_positions_cache_and_compiled": ("dynamic",),
    },
    "nn/test_fixed_cache.py": {
        "test_a_compiled_step_is_one_graph": ("groups and rotary-True-eager",),
        "test_compiled_code_that_is_refused_takes_no_position_out_of_a_window": 0,
        "test_inductor": 0,
        "test_two_hundred_tokens_are_one_graph": 0,
        "test_a_compiled_model_with_one_cache_for_its_layers": 0,
    },
    "nn/test_nn_masks.py": {
        "test_lengths_in_compiled_code": ("additive",),
        "test_both_hold": 3,
    },
    "nn/test_nn_record.py": {"test_compiled_calls_are_not_recorded": ("heads",)},
    "nn/test_prepared_keys.py": {"test_compiled": 0},
    "nn/test_torch_multihead_attention.py": {
        "test_compiled": 0,
        "test_the_call_is_torchs": 3,
        "test_encoders": 3,
    },
    "inspection/test_lazy_heads.py": {
        "test_memory_of_one_head": ("topk-16384-64",),
        "test_functions_of_torch_in_compiled_code": ("(1, 2)-exp",),
    },
    "inspection/test_plot.py": {
        "test_ticks_are_positions": ("12",),
        "test_words_do_not_overlap": 6,
    },
    "inspection/test_shares.py": {"test_pairs_with_equal_tokens": 3},
    "inspection/test_weights.py": {"test_reductions_equal_those_of_the_dense_matrix": 3},
    "inspection/test_statistics.py": {
        "test_statistics_and_gradients_are_those_of_dense_weights": 6,
        "test_derivatives_twice": 3,
    },
    "diagnosis/test_clean.py": {
        "test_normal_inputs": 3,
        "test_sizes_and_dtypes": 6,
    },
    "diagnosis/test_models.py": {"test_models_are_clean": 3},
    "diagnosis/test_shown.py": {"test_eighty_columns": 3},
    "distributed/test_distributed_attention.py": {
        "test_the_numbers_are_those_of_one_process": ("2-8",),
        "test_random_problems_are_within_their_budgets": ("2-0",),
    },
    "distributed/test_distributed_decoding.py": {"test_a_spread_cache_gives_the_output_of_one_process": ("2",)},
    "distributed/test_distributed_models.py": {
        "test_checkpoints_copies_setting_back_and_the_example": 0,
        "test_data_parallel_wrappers_beside": 0,
    },
    "distributed/test_distributed_statistics.py": {"test_statistics_are_those_of_one_process": ("2-4",)},
    "distributed/test_distributed_surroundings.py": {"test_what_surrounds_a_call": 0},
    "distributed/test_tensor_parallel.py": {
        "test_the_numbers_are_those_of_one_process": ("2",),
        "test_options_are_those_of_one_process": ("2",),
        "test_what_is_refused": ("2",),
        "test_random_modules_are_those_of_one_process": ("0-40",),
    },
    "explanation/test_notebook.py": {
        "test_jupyter_takes_and_runs_it": 0,
    },
    "explanation/test_bias_steps.py": {
        "test_the_page_computes_every_step_of_a_bias": 3,
        "test_each_step_is_computed_from_those_before_it": 2,
    },
    "explanation/test_modules.py": {
        "test_multi_head": 3,
        "test_options": 4,
        "test_torch_s_module": 3,
    },
    "explanation/test_steps.py": {
        "test_every_step_is_what_attention_computes": 4,
        "test_a_mask_s_code_gives_the_mask": 3,
    },
    "explanation/test_page.py": {
        "test_edited_inputs_give_what_python_gives": ("Additive-both",),
        "test_the_page_computes_every_step": 6,
        "test_where_it_cannot_compute_it_says_why_and_offers_no_change": 2,
        "test_what_is_written_out_comes_to_the_number": 2,
        "test_the_temperature_divides_all_that_the_softmax_is_taken_of": ("both",),
        "test_the_sliders_give_what_python_gives": ("1.5",),
    },
    "explanation/test_motion.py": {
        "test_it_fits_its_frame_and_every_word_reads": ("light-390",),
        "test_hostile_words_are_words": 0,
    },
    "explanation/test_page_examples.py": {
        "test_every_built_in_example_is_computed": ("masked-softmax",),
        "test_multi_head_attention_follows_its_input_and_its_weights": ("shared",),
        "test_positions_follow_their_input": ("rotary",),
        "test_gradients_are_of_the_numbers_first_given": 0,
        "test_the_temperature_reaches_what_would_happen_otherwise": 0,
    },
    "explanation/test_page_reader.py": {
        "test_a_narrow_screen_scrolls_tables_and_not_the_page": 0,
        "test_every_text_is_read_in_both_themes": 2,
        "test_what_is_no_number_is_refused": ("abc",),
        "test_an_address_that_names_nothing_does_no_harm": ("#step=nothing",),
        "test_among_all_steps_a_weight_lights_up_its_query_and_key": 0,
        "test_hostile_words_are_text": 0,
    },
    "explanation/test_page_whole_numbers.py": {
        "test_what_is_no_length_is_refused": ("--3",),
        "test_lengths_of_sequences": ("sinks",),
        "test_large_whole_numbers_are_exact": 0,
        "test_a_cell_of_a_mask_by_the_keyboard": ("Enter",),
        "test_a_length_of_0_leaves_a_query_nothing": 0,
        "test_positions_ids_and_prefixes": 0,
        "test_masks_that_stand_for_several_rows": 0,
        "test_other_ways_to_write_a_whole_number": 0,
        "test_turned_over_twice_nothing_is_changed": 0,
        "test_positions_of_a_rotation": 0,
        "test_a_computed_mask_is_not_an_input": 0,
    },
    "report/test_report_beside.py": {
        "test_texts_of_one_length": ("0",),
        "test_texts_whose_words_are_aligned": 0,
        "test_padding_in_one_of_them": 0,
        "test_both_texts_and_both_maps_stand_in_the_comparison": 0,
        "test_under_other_masks_a_divergence_is_not_known": 0,
    },
    "report/test_report_heads.py": {
        "test_a_small_map_is_shown_beside_the_matrix": 0,
        "test_marks_stand_out_on_every_colour": 0,
        "test_hostile_names_stay_text": 0,
        "test_a_near_uniform_model_says_so": 0,
        "test_what_is_not_known_is_no_number": 0,
    },
    "report/test_report_hostile.py": {
        "test_a_long_head_is_seen_from_afar_while_it_is_being_read": 0,
        "test_single_pairs_of_a_long_head_wait_for_its_query_and_key": 0,
        "test_a_hostile_title_is_text": 0,
    },
    "report/test_report_lines.py": {
        "test_closed_until_asked_for": 0,
        "test_lines_are_the_strongest_of_each_query": ("True-5",),
        "test_100_tokens_at_full_height_and_more_in_a_box": 0,
    },
    "report/test_report_long.py": {"test_parts_and_statistics_that_are_written": 0},
    "report/test_report_map.py": {
        "test_cells_of_several_pairs": ("holes",),
        "test_without_a_worker_the_page_computes_itself": 0,
        "test_from_afar_the_cells_are_those_that_python_wrote": 0,
        "test_a_long_head_is_computed_beside_the_page": 0,
        "test_two_fingers_zoom": 0,
    },
    "report/test_report_text.py": {
        "test_a_text_of_16384_tokens": 0,
        "test_arcs_show_the_strongest_pairs": ("out-tokens0",),
        "test_several_tokens_show_the_mean_of_their_looks": 0,
        "test_pieces_stand_where_the_letters_of_the_text_stand": 0,
        "test_hostile_tokens_stay_text": 0,
        "test_alt_takes_the_pair_with_the_chosen_token": 0,
        "test_unknown_words_as_they_were_spelled": 0,
    },
    "report/test_report_tools.py": {
        "test_on_paper_the_map_is_drawn_and_no_button_stands": 0,
        "test_larger_fills_the_width_with_the_map_and_has_larger_letters_on_it": 0,
        "test_of_a_long_text_the_map_is_saved_as_it_stands": 0,
        "test_the_saved_text_has_its_arcs_and_letters_as_on_the_page": 0,
        "test_on_a_phone_the_pair_stays_in_sight_and_opens": 0,
        "test_print_keeps_the_shading": 0,
        "test_the_focus_stays_among_the_squares_of_a_pair": 0,
    },
    "report/test_report_use.py": {"test_every_theme_and_width_can_be_read": ("dark",)},
    "report/test_report_compare.py": {
        "test_sharp_weights_and_a_long_text": 0,
        "test_hues_tell_which_is_more_and_the_ground_is_alike": 0,
        "test_the_share_of_a_sink_is_one_key_more": 0,
        "test_what_words_give_to_padding_is_one_key_more": 0,
    },
    "report/test_report_why.py": {"test_the_steps_are_those_of_explain": 3},
    "report/test_report_formulas.py": {
        "test_every_form_of_a_call": ("2",),
        "test_padding_is_left_out": 2,
    },
    "learning/test_motions.py": {"test_the_page_shows_the_frames": ("scores", "heads", "online")},
    "learning/test_first_pages.py": {"test_the_task_can_be_done_in_the_frame": ("2", "5")},
    "learning/test_trained.py": {"test_a_training_gives_the_stored_model": 0},
    "learning/test_transformer.py": {"test_it_sorts_in_600_steps": 0},
    "test_blocks_in_low_precision.py": {"test_gradients_are_rounded_once": ("tile", "bias", "twice")},
    "learning/test_induction.py": {"test_thirty_steps_lower_the_loss": 0},
    "report/test_report_meanings.py": {"test_a_part_of_the_layers_or_heads_has_no_rollout": 0},
    "test_fuzz_modules.py": {
        "test_no_module_is_beyond_its_budget": ("0-40",),
        "test_a_fault_is_found": 2,
        "test_the_budget_tells_a_rounding_of_a_lower_precision": 0,
    },
    "nn/test_recording.py": {
        "test_compiled_code_with_checkpoints": ("heads with options-first compiled", "torch-called before"),
        "test_switching_compiles_nothing_anew": ("heads with options",),
    },
    "learning/test_checks.py": {
        "test_a_notebook_shows_the_message_alone": 0,
    },
    "models/test_flex_calls.py": {
        "test_a_call_of_ones_own_is_recorded": 3,
        "test_a_model_of_transformers": 3,
    },
    "models/test_sparse_positions.py": {
        "test_an_edit_and_joined_rows_are_of_the_position_that_is_meant": 3,
    },
    "models/test_called_layers.py": {
        "test_numbers_are_those_of_the_merged_weights": 3,
    },
    "explanation/test_gradients.py": {
        "test_every_formula_of_a_gradient_comes_to_its_numbers": 3,
    },
    "learning/test_exercises.py": {
        "test_a_wrong_answer_is_told_why": 3,
        "test_a_page_checks_its_solution_as_it_checks_an_answer": 3,
        "test_an_answer_left_as_it_was_is_not_answered_yet": 3,
    },
    "explanation/test_examples.py": {
        "test_the_caller_s_surroundings_change_no_example": 3,
    },
    "models/test_hidden_keys.py": {
        "test_statistics_are_those_of_what_the_model_does_not_hide": 2,
        "test_any_structure_and_any_padding": 3,
    },
    "models/test_lazy_consumers.py": {
        "test_consumers": 3,
    },
    "models/test_entered_by_forward.py": {
        "test_the_record_is_that_of_a_call": 3,
    },
}


def mark(items: Sequence[Any], whole: bool) -> None:
    """Give each of the tests above its marker. `whole`: each file that is collected is collected whole."""
    found: dict[tuple[str, str], list[bool]] = {}
    for item in items:
        file, _, test = item.nodeid.removeprefix("tests/").partition("::")
        name, _, given = test.partition("[")
        kept = EXPLORED.get(file, {}).get(name)
        if kept is None:
            continue
        given = given.removesuffix("]")
        stays = given in kept if isinstance(kept, tuple) else kept > 0 and zlib.crc32(given.encode()) % kept == 0
        found.setdefault((file, name), []).append(stays)
        if not stays:
            item.add_marker(pytest.mark.explore)
    files = {item.nodeid.removeprefix("tests/").partition("::")[0] for item in items}
    for file, tests in EXPLORED.items() if whole else ():
        for name, kept in tests.items():
            stays = found.get((file, name), [])
            right = sum(stays) == len(kept) if isinstance(kept, tuple) else any(stays) == (kept > 0)
            if file in files and not (stays and right):
                raise pytest.UsageError(
                    f"explored.py, {file}, {name}: {kept!r} keeps {sum(stays)} of {len(stays)} tests"
                )
