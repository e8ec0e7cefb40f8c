# Environment of a training process on GB200 and GB300, one GPU each; scripts/launch.sh sources it where it sees
# GPUs. What is set already wins: a variable is kept, and of two equal flags in XLA_FLAGS the later one, the
# user's, counts. All flags are known to the XLA of jaxlib 0.12.0.1, which ends a process at an unknown one.
# shellcheck shell=bash

# JAX takes this share of GPU memory at once. Its default is .75; what is left is for cuBLAS, cuDNN and NCCL.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.9}

xla=(
    # Start the gather of the next layer's weights, and send the last one's gradients, behind this one's GEMMs.
    --xla_gpu_enable_latency_hiding_scheduler=true
    # The same across iterations of the loop over layers, which `scan_layers: true` makes. (The flags
    # xla_gpu_enable_pipelined_* of older recipes are deprecated names for these.)
    --xla_gpu_pipeline_all_gather=on
    --xla_gpu_pipeline_reduce_scatter=on
    --xla_gpu_pipeline_all_reduce=on
    # One collective for all weights of a layer rather than one for each. The threshold is what may be combined:
    # at least one layer's weights, which 8 GiB is for every model in configs/.
    --xla_gpu_all_gather_combine_threshold_bytes=8589934592
    --xla_gpu_reduce_scatter_combine_threshold_bytes=8589934592
    --xla_gpu_all_reduce_combine_threshold_bytes=8589934592
    # cuBLAS for the GEMMs that stay in BF16, faster at these sizes than what Triton would generate.
    --xla_gpu_enable_triton_gemm=false
    # remat_policy says what is computed twice; XLA's own pass would repeat quantizations to save memory.
    --xla_disable_hlo_passes=rematerialization
    # A knob, left at XLA's default: --xla_gpu_enable_command_buffer= (empty) turns CUDA graphs off, which gives
    # memory back, and --xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL restricts them to what gains most.
)
export XLA_FLAGS="${xla[*]}${XLA_FLAGS:+ $XLA_FLAGS}"
unset xla

# Not set on purpose: CUDA_DEVICE_MAX_CONNECTIONS. The value 1 of recipes for Hopper serializes kernels on
# Blackwell that should overlap.
