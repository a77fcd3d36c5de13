/* NVML on a machine whose first GPU is sliced by MIG; three of the slices' numbers are taken. The second GPU knows no MIG. With STAND_IN_GPUS=none
   there is the driver alone. */
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char* text, unsigned size) { strncpy(text, "580.65.06", size); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { const char* wish = getenv("STAND_IN_GPUS"); *count = wish && !strcmp(wish, "none") ? 0 : 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** gpu) { *gpu = (void*)(1L + index); return 0; }
int nvmlDeviceGetCudaComputeCapability(void* gpu, int* major, int* minor) { *major = 8; *minor = gpu == (void*)1 ? 0 : 9; return 0; }
int nvmlDeviceGetName(void* gpu, char* text, unsigned size) { strncpy(text, gpu == (void*)1 ? "NVIDIA A100" : "NVIDIA L40S", size); return 0; }
int nvmlDeviceGetMemoryInfo(void* gpu, Memory* memory) { return 4; }  /* no permission: as in a container that has one slice */
int nvmlDeviceGetMigMode(void* gpu, unsigned* now, unsigned* later) { *now = *later = 1; return gpu == (void*)1 ? 0 : 3; }
int nvmlDeviceGetMaxMigDeviceCount(void* gpu, unsigned* count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void* gpu, unsigned index, void** slice) { *slice = (void*)(16L + index); return index % 3 ? 6 : 0; }
int nvmlDeviceGetUUID(void* gpu, char* text, unsigned size) {
  strncpy(text, gpu == (void*)1 ? "GPU-aaa" : gpu == (void*)2 ? "GPU-bbb" : "MIG-0", size);
  if ((long)gpu > 15) text[4] += (long)gpu - 16;
  return 0;
}
