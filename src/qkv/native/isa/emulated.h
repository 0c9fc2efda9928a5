/* The tile instructions of AMX in plain C, to compile and test amx.h on any processor: as the processor does, products take
 * numbers that are no normal bfloat16 as 0. */
typedef struct { uint16_t bytes[8], rows[8]; uint8_t palette; } EmulatedConfig;
static _Thread_local EmulatedConfig emulated_config;
static _Thread_local float emulated_tiles[8][16][16];

static void emulated_load(int tile, const void *from, int64_t stride) {
    if (emulated_config.palette != 1) abort(); /* as the processor would end the program */
    for (int r = 0; r < 16; r++) memcpy(emulated_tiles[tile][r], (const char *)from + r * stride, 64);
}
static void emulated_store(int tile, void *to, int64_t stride) {
    if (emulated_config.palette != 1) abort();
    for (int r = 0; r < 16; r++) memcpy((char *)to + r * stride, emulated_tiles[tile][r], 64);
}
static float emulated_factor(uint32_t bits) { /* in the upper half of the bits */
    float x;
    bits &= 0xffff0000;
    if (!(bits & 0x7f800000)) bits &= 0x80000000;
    memcpy(&x, &bits, 4);
    return x;
}
static void emulated_products(int sums, int first, int second) {
    for (int k = 0; k < 16; k++)
        for (int r = 0; r < 16; r++) {
            uint32_t a, b[16];
            memcpy(&a, &emulated_tiles[first][r][k], 4), memcpy(b, emulated_tiles[second][k], 64);
            const float a0 = emulated_factor(a << 16), a1 = emulated_factor(a);
            for (int j = 0; j < 16; j++)
                emulated_tiles[sums][r][j] += a1 * emulated_factor(b[j]) + a0 * emulated_factor(b[j] << 16);
        }
}
#define _tile_loadconfig(config) (emulated_config.palette = *(const uint8_t *)(config))
#define _tile_storeconfig(config) (*(uint8_t *)(config) = emulated_config.palette)
#define _tile_release() (emulated_config.palette = 0)
#define _tile_zero(tile) memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile])
#define _tile_loadd emulated_load
#define _tile_stream_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbf16ps emulated_products
