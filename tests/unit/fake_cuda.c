/* The part of a CUDA driver that the doctor asks, for test_doctor_gpu.py. FAKE_CUDA says what goes wrong, as words:

     FUNCTION=CODE   the function returns this error      FUNCTION=hang, =die   it never returns, ends the process
     gpus=N          how many there are (1)               split                 they have no unified addressing

   Registered memory is read and written through the address that was given, as a GPU would. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *registered;
static size_t registered_bytes;
static int context;

static const char *asked(const char *word) {
    const char *all = getenv("FAKE_CUDA");
    const char *found = all ? strstr(all, word) : NULL;
    return found ? found + strlen(word) : NULL;
}

static int trouble(const char *function) {
    char word[64];
    snprintf(word, sizeof word, "%s=", function);
    const char *how = asked(word);
    if (how && !strncmp(how, "hang", 4))
        for (;;)
            pause();
    if (how && !strncmp(how, "die", 3))
        abort();
    return how ? atoi(how) : 0;
}

#define FUNCTION(name, ...)                                                                                            \
    int name(__VA_ARGS__) {                                                                                            \
        int code = trouble(#name);                                                                                     \
        if (code)                                                                                                      \
            return code;

FUNCTION(cuInit, unsigned flags)
    return flags;
}
FUNCTION(cuDriverGetVersion, int *version)
    *version = 12040;
    return 0;
}
FUNCTION(cuDeviceGetCount, int *count)
    *count = asked("gpus=") ? atoi(asked("gpus=")) : 1;
    return 0;
}
FUNCTION(cuDeviceGet, int *device, int ordinal)
    *device = 100 + ordinal; /* a handle, not its number */
    return 0;
}
FUNCTION(cuDeviceGetName, char *name, int room, int device)
    snprintf(name, room, "Fake %d", device - 100);
    return 0;
}
FUNCTION(cuDeviceTotalMem_v2, size_t *total, int device)
    *total = (size_t)80 << 30;
    return device < 100;
}
FUNCTION(cuDeviceGetAttribute, int *value, int attribute, int device)
    *value = attribute == 41 && !asked("split");
    return device < 100;
}
FUNCTION(cuDevicePrimaryCtxRetain, void **made, int device)
    *made = &context;
    return device != 100;
}
FUNCTION(cuCtxSetCurrent, void *current)
    return current != &context;
}
FUNCTION(cuMemHostRegister_v2, char *memory, size_t bytes, unsigned flags)
    registered = memory;
    registered_bytes = bytes;
    memset(memory, 1, bytes);
    return flags != 1 || bytes != 64 << 20;
}
FUNCTION(cuMemHostUnregister, char *memory)
    for (size_t at = 0; at < registered_bytes; at += 4096)
        if (memory[at] != 1)
            return 1;
    return memory != registered;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
        : code == 34 ? "CUDA_ERROR_STUB_LIBRARY" : code == 46 ? "CUDA_ERROR_DEVICE_UNAVAILABLE"
        : code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : NULL;
    return *name ? 0 : 1;
}
