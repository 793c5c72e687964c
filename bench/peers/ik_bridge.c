/* A library for engine_ikllamacpp.py: the functions of ik_llama.cpp that take structures, with plain
 * arguments. The layout of the structures differs between versions, so compile this file with the
 * header of the same source tree (README.md shows the command).
 */

#include <stddef.h>
#include <stdint.h>

#include "llama.h"

enum { MAX_BATCH_TOKENS = 2048, MAX_MICRO_BATCH = 512 };

/* Return the model of a GGUF file, or NULL. repack: convert the weights to interleaved rows (-rtr).
 * merge_qkv: one product for Q, K and V (-mqkv).
 */
struct llama_model * bridge_load(const char * path, int32_t repack, int32_t merge_qkv) {
    struct llama_model_params params = llama_model_default_params();
    params.use_mmap = false;
    params.repack_tensors = repack != 0;
    params.merge_qkv = merge_qkv != 0;
    return llama_model_load_from_file(path, params);
}

/* Return a context with one cache of num_streams * stream_size tokens for all requests, or NULL.
 * flash: use flash attention (-fa). cache_type: a ggml_type; a negative number selects the default.
 * Fused operations and the reuse of graphs are on.
 */
struct llama_context * bridge_create_context(struct llama_model * model, int32_t num_streams,
                                             int32_t stream_size, int32_t threads, int32_t flash,
                                             int32_t cache_type) {
    struct llama_context_params params = llama_context_default_params();
    params.n_seq_max = num_streams;
    params.n_ctx = num_streams * stream_size;
    params.n_batch = MAX_BATCH_TOKENS;
    params.n_ubatch = MAX_MICRO_BATCH;
    params.n_threads = params.n_threads_batch = threads;
    params.flash_attn = flash != 0;
    params.fused_up_gate = params.fused_mmad = params.graph_reuse = true;
    if (cache_type >= 0) {
        params.type_k = params.type_v = (enum ggml_type) cache_type;
    }
    return llama_init_from_model(model, params);
}

/* Run the model on a batch and return llama_decode's code. rows: the stream of each token.
 * samples: not 0 for the tokens whose logits are needed.
 */
int32_t bridge_decode(struct llama_context * context, int32_t num_tokens, int32_t * tokens,
                      int32_t * positions, int32_t * rows, int8_t * samples) {
    static int32_t counts[MAX_BATCH_TOKENS];
    static int32_t * streams[MAX_BATCH_TOKENS];
    if (num_tokens < 1 || num_tokens > MAX_BATCH_TOKENS) {
        return -1;
    }
    for (int32_t i = 0; i < num_tokens; ++i) {
        counts[i] = 1;
        streams[i] = rows + i;
    }
    struct llama_batch batch = {
        .n_tokens = num_tokens,
        .token = tokens,
        .pos = positions,
        .n_seq_id = counts,
        .seq_id = streams,
        .logits = samples,
    };
    return llama_decode(context, batch);
}
