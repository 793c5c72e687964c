// Sizes of the structs of the ABI, by name: a binding whose structs differ rejects the library.
#include <cstring>

#include "dovetail_attention.h"
#include "dovetail_experts.h"
#include "dovetail_kernels.h"
#include "dovetail_ops.h"
#include "dovetail_sampling.h"
#include "dovetail_states.h"

int64_t dk_struct_bytes(const char* name) {
#define DK_SIZE(type) \
  if (strcmp(name, #type) == 0) return sizeof(type)
  DK_SIZE(dk_attention_batch);
  DK_SIZE(dk_attention_args);
  DK_SIZE(dk_attention_work);
  DK_SIZE(dk_bidirectional_args);
  DK_SIZE(dk_pack_linear_args);
  DK_SIZE(dk_linear_args);
  DK_SIZE(dk_probe_read_args);
  DK_SIZE(dk_probe_multiply_args);
  DK_SIZE(dk_rms_norm_args);
  DK_SIZE(dk_add_rms_norm_args);
  DK_SIZE(dk_layer_norm_args);
  DK_SIZE(dk_rotary_args);
  DK_SIZE(dk_silu_mul_args);
  DK_SIZE(dk_gate_mul_args);
  DK_SIZE(dk_embedding_args);
  DK_SIZE(dk_gated_norm_args);
  DK_SIZE(dk_scale_args);
  DK_SIZE(dk_add_shared_args);
  DK_SIZE(dk_head_linear_args);
  DK_SIZE(dk_argmax_args);
  DK_SIZE(dk_mask_args);
  DK_SIZE(dk_select_experts_args);
  DK_SIZE(dk_experts_args);
  DK_SIZE(dk_state_parts);
  DK_SIZE(dk_causal_conv_args);
  DK_SIZE(dk_linear_attention_args);
  DK_SIZE(dk_gated_recurrence_args);
#undef DK_SIZE
  return 0;
}

int64_t dk_pack_version(void) { return DK_PACK_VERSION; }
