// A libcudart over the stub of libcuda, so that a real PyTorch runs without a device. The stub provides streams, events, memory and
// captures; kernels have no effect. The Python tests build it. Calls that no test needs return an error.
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern int cuInit(unsigned);
extern int cuDeviceGetCount(int*);
extern int cuDevicePrimaryCtxRetain(void**, int);
extern int cuCtxSetCurrent(void*);
extern int cuCtxGetCurrent(void**);
extern int cuCtxGetDevice(int*);
extern int cuCtxSynchronize(void);
extern int cuMemGetInfo_v2(size_t*, size_t*);
extern int cuMemAlloc_v2(uint64_t*, size_t);
extern int cuMemFree_v2(uint64_t);
extern int cuMemHostAlloc(void**, size_t, unsigned);
extern int cuMemFreeHost(void*);
extern int cuStreamCreate(void**, unsigned);
extern int cuStreamDestroy_v2(void*);
extern int cuStreamSynchronize(void*);
extern int cuStreamWaitEvent(void*, void*, unsigned);
extern int cuStreamIsCapturing(void*, int*);
extern int cuStreamGetCaptureInfo_v2(void*, int*, uint64_t*, void*, void*, void*);
extern int cuStreamBeginCapture_v2(void*, int);
extern int cuStreamEndCapture(void*, void**);
extern int cuEventCreate(void**, unsigned);
extern int cuEventDestroy_v2(void*);
extern int cuEventRecord(void*, void*);
extern int cuEventQuery(void*);
extern int cuEventSynchronize(void*);
extern int cuThreadExchangeStreamCaptureMode(int*);
extern int cuGraphInstantiateWithFlags(void**, void*, unsigned long long);
extern int cuGraphLaunch(void*, void*);
extern int cuGraphDestroy(void*);
extern int cuGraphExecDestroy(void*);

static __thread int last_error;

static cudaError_t told(int code) {
  if (code != 0 && code != 600) last_error = code;
  return (cudaError_t)code;
}

static void here(void) {
  void* context = NULL;
  cuInit(0);
  if (cuCtxGetCurrent(&context) == 0 && context == NULL) cudaSetDevice(0);
}

cudaError_t cudaGetDeviceCount(int* count) { cuInit(0); return told(cuDeviceGetCount(count)); }
cudaError_t cudaSetDevice(int device) {
  void* context = NULL;
  cuInit(0);
  int status = cuDevicePrimaryCtxRetain(&context, device);
  return told(status != 0 ? status : cuCtxSetCurrent(context));
}
cudaError_t cudaGetDevice(int* device) {
  void* context = NULL;
  *device = 0;
  cuInit(0);
  if (cuCtxGetCurrent(&context) != 0 || context == NULL) return cudaSuccess;
  return told(cuCtxGetDevice(device));
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  size_t free_bytes = 0, total = 0;
  (void)device;
  here();
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "stub");
  cuMemGetInfo_v2(&free_bytes, &total);
  properties->totalGlobalMem = total;
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxThreadsPerBlock = 1024;
  properties->warpSize = 32;
  properties->sharedMemPerBlock = 49152;
  properties->maxGridSize[0] = properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr a, int d) { (void)a; (void)d; *value = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int d) { (void)d; strncpy(id, "0000:00:00.0", length); return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { here(); return told(cuCtxSynchronize()); }
cudaError_t cudaDeviceCanAccessPeer(int* can, int d, int p) { (void)d; (void)p; *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int p, unsigned f) { (void)p; (void)f; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { int error = last_error; last_error = 0; return (cudaError_t)error; }
cudaError_t cudaPeekAtLastError(void) { return (cudaError_t)last_error; }
const char* cudaGetErrorName(cudaError_t e) { (void)e; return "cudaError"; }
const char* cudaGetErrorString(cudaError_t e) { (void)e; return "an error of the stub runtime"; }
cudaError_t cudaMemGetInfo(size_t* f, size_t* t) { here(); return told(cuMemGetInfo_v2(f, t)); }
cudaError_t cudaMalloc(void** p, size_t n) { here(); return told(cuMemAlloc_v2((uint64_t*)p, n)); }
cudaError_t cudaFree(void* p) { here(); return p == NULL ? cudaSuccess : told(cuMemFree_v2((uint64_t)p)); }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned f) { here(); return told(cuMemHostAlloc(p, n, f)); }
cudaError_t cudaMallocHost(void** p, size_t n) { here(); return told(cuMemHostAlloc(p, n, 0)); }
cudaError_t cudaFreeHost(void* p) { return told(cuMemFreeHost(p)); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, enum cudaMemcpyKind k) { (void)k; memcpy(to, from, n); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) { (void)s; return cudaMemcpy(to, from, n, k); }
cudaError_t cudaMemcpyPeerAsync(void* to, int a, const void* from, int b, size_t n, cudaStream_t s) { (void)a; (void)b; (void)s; memcpy(to, from, n); return cudaSuccess; }
cudaError_t cudaMemset(void* p, int v, size_t n) { memset(p, v, n); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t s) { (void)s; memset(p, v, n); return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* a, const void* p) { memset(a, 0, sizeof *a); a->type = cudaMemoryTypeDevice; a->devicePointer = (void*)p; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned f, int p) { (void)p; here(); return told(cuStreamCreate((void**)s, f)); }
cudaError_t cudaStreamCreate(cudaStream_t* s) { here(); return told(cuStreamCreate((void**)s, 0)); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { here(); return told(cuStreamCreate((void**)s, f)); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return told(cuStreamDestroy_v2(s)); }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { here(); return told(cuStreamSynchronize(s)); }
cudaError_t cudaStreamQuery(cudaStream_t s) { (void)s; return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) { (void)s; *p = 0; return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { here(); return told(cuStreamWaitEvent(s, e, f)); }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus* status) { here(); return told(cuStreamIsCapturing(s, (int*)status)); }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* g, const cudaGraphNode_t** n, const cudaGraphEdgeData** e, size_t* c) {
  uint64_t found = 0;
  (void)g; (void)n; (void)e; (void)c;
  here();
  int code = cuStreamGetCaptureInfo_v2(s, (int*)status, &found, NULL, NULL, NULL);
  if (id != NULL) *id = found;
  return told(code);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) { return told(cuStreamBeginCapture_v2(s, m)); }
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) { return told(cuStreamEndCapture(s, (void**)g)); }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* m) { return told(cuThreadExchangeStreamCaptureMode((int*)m)); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned f) { here(); return told(cuEventCreate((void**)e, f)); }
cudaError_t cudaEventCreate(cudaEvent_t* e) { here(); return told(cuEventCreate((void**)e, 0)); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return told(cuEventDestroy_v2(e)); }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { here(); return told(cuEventRecord(e, s)); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { (void)f; return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) { return told(cuEventQuery(e)); }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return told(cuEventSynchronize(e)); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { (void)a; (void)b; *ms = 0; return cudaSuccess; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long f) { return told(cuGraphInstantiateWithFlags((void**)e, g, f)); }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long f) { return told(cuGraphInstantiateWithFlags((void**)e, g, f)); }
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { return told(cuGraphLaunch(e, s)); }
cudaError_t cudaGraphDestroy(cudaGraph_t g) { return told(cuGraphDestroy(g)); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { return told(cuGraphExecDestroy(e)); }
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* n, size_t* c) { (void)g; (void)n; *c = 1; return cudaSuccess; }
// The handle contains the event itself, which another process cannot use. Opening it creates a new, completed event.
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* h, cudaEvent_t e) { memset(h, 0, sizeof *h); memcpy(h, &e, sizeof e); return cudaSuccess; }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* e, cudaIpcEventHandle_t h) { (void)h; return cudaEventCreate(e); }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* h, void* p) { (void)h; (void)p; return told(801); }
cudaError_t cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t h, unsigned f) { (void)p; (void)h; (void)f; return told(801); }
cudaError_t cudaIpcCloseMemHandle(void* p) { (void)p; return told(801); }
cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void** a, size_t n, cudaStream_t s) { (void)f; (void)g; (void)b; (void)a; (void)n; (void)s; return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) { (void)c; (void)f; (void)a; return cudaSuccess; }
cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void** a, size_t n, cudaStream_t s) { (void)f; (void)g; (void)b; (void)a; (void)n; (void)s; return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* a, const void* f) { (void)f; memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void* f, enum cudaFuncAttribute a, int v) { (void)f; (void)a; (void)v; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* f, int b, size_t s) { (void)f; (void)b; (void)s; *n = 1; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* f, int b, size_t s, unsigned g) { (void)f; (void)b; (void)s; (void)g; *n = 1; return cudaSuccess; }
void** __cudaRegisterFatBinary(void* b) { static void* handle; (void)b; return &handle; }
void __cudaRegisterFatBinaryEnd(void** h) { (void)h; }
void __cudaUnregisterFatBinary(void** h) { (void)h; }
void __cudaRegisterFunction(void** h, const char* f, char* n, const char* d, int t, void* a, void* b, void* c, void* e, int* w) { (void)h; (void)f; (void)n; (void)d; (void)t; (void)a; (void)b; (void)c; (void)e; (void)w; }
void __cudaRegisterVar(void** h, char* v, char* a, const char* n, int e, size_t s, int c, int g) { (void)h; (void)v; (void)a; (void)n; (void)e; (void)s; (void)c; (void)g; }
char __cudaInitModule(void** h) { (void)h; return 1; }
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t n, void* s) { (void)g; (void)b; (void)n; (void)s; return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* n, void* s) { (void)g; (void)b; *n = 0; *(void**)s = NULL; return cudaSuccess; }
cudaError_t __cudaGetKernel(void** k, const void* f) { *k = (void*)f; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(void* k, dim3 g, dim3 b, void** a, size_t n, cudaStream_t s) { (void)k; (void)g; (void)b; (void)a; (void)n; (void)s; return cudaSuccess; }
