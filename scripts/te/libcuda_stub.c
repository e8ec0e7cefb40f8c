/*
 * Stands in for the CUDA driver, so that Transformer Engine can be imported, and its calls lowered, on a
 * machine that has none. Every function fails as the driver does without a GPU. For tests: nothing runs on it.
 */

#define NO_DEVICE 100 /* CUDA_ERROR_NO_DEVICE */
#define STUB(name) \
    int name(void) { return NO_DEVICE; }

#ifdef __cplusplus
extern "C" {
#endif

STUB(cuGetErrorString)
STUB(cuModuleGetFunction)
STUB(cuModuleLoadData)
STUB(cuModuleUnload)
STUB(cuTensorMapEncodeIm2col)
STUB(cuTensorMapEncodeTiled)

#ifdef __cplusplus
}
#endif
