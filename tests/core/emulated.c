/* Calls the library's functions for another process, in whose memory the arguments are: see emulated.py. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int qkv_attend(const void *call);
int qkv_decode(const void *call);
int qkv_gradients(const void *call);
int qkv_pool(const void *weights);
int qkv_eigenvalues(const void *matrices);
int qkv_nodes(const void *scores);

typedef struct {
    int64_t address, size;
    char *here;
} Block;

static int64_t number(void) {
    int64_t x;
    if (fread(&x, sizeof x, 1, stdin) != 1) exit(0); /* the other process has ended */
    return x;
}

static char *found(const Block *blocks, int64_t n, int64_t address) {
    for (int64_t i = 0; i < n; i++)
        if (blocks[i].address <= address && address < blocks[i].address + blocks[i].size)
            return blocks[i].here + (address - blocks[i].address);
    fprintf(stderr, "no block holds address %lld\n", (long long)address);
    exit(1);
}

int main(void) {
    int (*const functions[])(const void *) = {
        qkv_attend, qkv_decode, qkv_gradients, qkv_pool, qkv_eigenvalues, qkv_nodes,
    };
    for (;;) {
        const int64_t function = number(), n = number();
        Block *blocks = malloc((size_t)n * sizeof *blocks);
        for (int64_t i = 0; i < n; i++) {
            blocks[i].address = number();
            blocks[i].size = number();
            blocks[i].here = aligned_alloc(64, ((size_t)blocks[i].size + 127) / 64 * 64);
            if (fread(blocks[i].here, 1, (size_t)blocks[i].size, stdin) != (size_t)blocks[i].size) exit(1);
        }
        for (int64_t pointers = number(); pointers > 0; pointers--) {
            char *slot = found(blocks, n, number());
            int64_t address;
            memcpy(&address, slot, sizeof address);
            char *here = found(blocks, n, address);
            memcpy(slot, &here, sizeof here);
        }
        const int64_t status = functions[function](found(blocks, n, number()));
        fwrite(&status, sizeof status, 1, stdout);
        for (int64_t i = 0; i < n; i++) {
            fwrite(blocks[i].here, 1, (size_t)blocks[i].size, stdout);
            free(blocks[i].here);
        }
        free(blocks);
        fflush(stdout);
    }
}
