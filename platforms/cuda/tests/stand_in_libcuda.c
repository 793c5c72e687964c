/* A stand-in for libcuda: the functions for virtual memory, on memory of the host.

   A reservation is a range without access; an allocation is a file in memory; a mapping makes the
   file readable and writable in the range. Every call that the driver documents as invalid returns
   an error and is recorded in stand_in_misuse. A use of memory that is not mapped is a
   segmentation fault. A test sets the free memory, and the next failure of a function. */

#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef struct { int type, id; } location;
typedef struct {
    int type, handle_types;
    location place;
    void *win32;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char rest[4]; } flags;
} properties;
typedef struct { location place; int flags; } access_description;

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, MANY = 1024 };
enum { PAGE = 65536 };

typedef struct { char *start; size_t size; u64 handle; } range;
typedef struct { size_t size; int file, released, mappings; } allocation;

static range reservations[MANY], mappings[MANY];
static allocation allocations[MANY];
static int initialized, is_supported = 1, failing_status;
static size_t capacity, used;
static char misuse[256], failing[64];

void stand_in_reset(size_t free_bytes, int supported) {
    capacity = free_bytes;
    is_supported = supported;
    misuse[0] = failing[0] = 0;
}
void stand_in_set_free(size_t free_bytes) { capacity = used + free_bytes; }
size_t stand_in_used(void) { return used; }
const char *stand_in_misuse(void) { return misuse; }
void stand_in_fail_next(const char *name, int status) {
    snprintf(failing, sizeof failing, "%s", name);
    failing_status = status;
}
int stand_in_num_reservations(void) {
    int count = 0;
    for (int i = 0; i < MANY; i++) count += reservations[i].start != NULL;
    return count;
}

static int wrong(const char *name, const char *what) {
    if (!misuse[0]) snprintf(misuse, sizeof misuse, "%s: %s", name, what);
    return INVALID_VALUE;
}
static int begin(const char *name) {
    if (!initialized) return NOT_INITIALIZED;
    if (strcmp(failing, name)) return 0;
    failing[0] = 0;
    return failing_status;
}
#define BEGIN do { int status = begin(__func__); if (status) return status; } while (0)
#define REQUIRE(condition, what) do { if (!(condition)) return wrong(__func__, what); } while (0)

static range *find(range *table, char *start, size_t size) {
    for (int i = 0; i < MANY; i++)
        if (table[i].start == start && (!start || table[i].size == size)) return &table[i];
    return NULL;
}
static void drop(allocation *one) {
    if (!one->released || one->mappings) return;
    close(one->file);
    used -= one->size;
    memset(one, 0, sizeof *one);
}
static int is_plain(const properties *given) {
    return given->type == 1 && given->handle_types == 0 && given->place.type == 1 &&
           given->place.id == 0 && !given->win32 && !given->flags.compression;
}

int cuInit(unsigned flags) {
    initialized = 1;
    return flags ? INVALID_VALUE : 0;
}
int cuDeviceGet(int *device, int ordinal) {
    BEGIN;
    REQUIRE(ordinal == 0, "the device does not exist");
    *device = 0;
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN;
    REQUIRE(attribute == 102 && device == 0, "unexpected attribute");
    *value = is_supported;
    return 0;
}
int cuMemGetAllocationGranularity(size_t *size, const properties *given, int option) {
    BEGIN;
    REQUIRE(is_plain(given) && (option == 0 || option == 1), "wrong properties");
    *size = PAGE;
    return 0;
}
int cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 hint, u64 flags) {
    BEGIN;
    REQUIRE(size && size % PAGE == 0, "the size is not a multiple of the granularity");
    REQUIRE(!alignment && !hint && !flags, "unexpected arguments");
    range *free_entry = find(reservations, NULL, 0);
    char *start = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED || !free_entry) return OUT_OF_MEMORY;
    *free_entry = (range){start, size, 0};
    *address = (u64)start;
    return 0;
}
int cuMemAddressFree(u64 address, size_t size) {
    BEGIN;
    range *one = find(reservations, (char *)address, size);
    REQUIRE(address && one, "the range is not reserved");
    REQUIRE(!find(mappings, one->start, size), "the range is still mapped");
    munmap(one->start, size);
    one->start = NULL;
    return 0;
}
int cuMemCreate(u64 *handle, size_t size, const properties *given, u64 flags) {
    BEGIN;
    REQUIRE(size && size % PAGE == 0, "the size is not a multiple of the granularity");
    REQUIRE(is_plain(given) && !flags, "wrong properties");
    if (used + size > capacity) return OUT_OF_MEMORY;
    for (int i = 0; i < MANY; i++) {
        if (allocations[i].size) continue;
        int file = memfd_create("stand_in", 0);
        if (file < 0 || ftruncate(file, (off_t)size)) return OUT_OF_MEMORY;
        allocations[i] = (allocation){size, file, 0, 0};
        used += size;
        *handle = (u64)i + 1;
        return 0;
    }
    return OUT_OF_MEMORY;
}
int cuMemRelease(u64 handle) {
    BEGIN;
    REQUIRE(handle && handle <= MANY && allocations[handle - 1].size, "unknown handle");
    allocation *one = &allocations[handle - 1];
    REQUIRE(!one->released, "the handle was released before");
    one->released = 1;
    drop(one);
    return 0;
}
int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
    BEGIN;
    REQUIRE(find(reservations, (char *)address, size), "the range is not reserved");
    REQUIRE(!find(mappings, (char *)address, size), "the range is mapped");
    REQUIRE(handle && handle <= MANY, "unknown handle");
    allocation *one = &allocations[handle - 1];
    REQUIRE(one->size == size && !one->released && !offset && !flags, "wrong arguments");
    range *free_entry = find(mappings, NULL, 0);
    char *start = mmap((char *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, one->file, 0);
    if (start == MAP_FAILED || !free_entry) return OUT_OF_MEMORY;
    *free_entry = (range){start, size, handle};
    one->mappings++;
    return 0;
}
int cuMemSetAccess(u64 address, size_t size, const access_description *given, size_t count) {
    BEGIN;
    REQUIRE(find(mappings, (char *)address, size), "the range is not mapped");
    REQUIRE(count == 1 && given->flags == 3 && given->place.type == 1 && given->place.id == 0,
            "wrong access");
    if (mprotect((char *)address, size, PROT_READ | PROT_WRITE)) return INVALID_VALUE;
    memset((char *)address, 0xFF, size); /* new memory has undefined contents: NaN */
    return 0;
}
int cuMemUnmap(u64 address, size_t size) {
    BEGIN;
    range *one = find(mappings, (char *)address, size);
    REQUIRE(address && one, "the range is not mapped");
    allocation *mapped = &allocations[one->handle - 1];
    mmap(one->start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    one->start = NULL;
    mapped->mappings--;
    drop(mapped);
    return 0;
}
