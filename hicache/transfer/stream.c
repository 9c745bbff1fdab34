/* Copies pages past the processor's caches.
 *
 * An ordinary store first reads the line that it overwrites; a streaming store does not, which spares a third of the memory traffic.
 * glibc's memcpy streams too, but judges by the size of one call, so pages that are not neighbours never profit. As there, four
 * stretches of 4 KiB are copied in turns, so that as many of the memory's rows are open at once.
 *
 * Built without Python's headers and called through ctypes; optional (hicache/transfer/streaming.py).
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

enum { LINE = 64, STRETCH = 4096, LANES = 4 };

static inline void stream_line(char *dst, const char *src) {
    __m128i a = _mm_loadu_si128((const __m128i *)src), b = _mm_loadu_si128((const __m128i *)(src + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(src + 32)), d = _mm_loadu_si128((const __m128i *)(src + 48));
    _mm_stream_si128((__m128i *)dst, a);
    _mm_stream_si128((__m128i *)(dst + 16), b);
    _mm_stream_si128((__m128i *)(dst + 32), c);
    _mm_stream_si128((__m128i *)(dst + 48), d);
}

static void stream_page(char *dst, const char *src, size_t bytes) {
    size_t at = 0;
    for (; at + LANES * STRETCH <= bytes; at += LANES * STRETCH)
        for (size_t line = at; line < at + STRETCH; line += LINE)
            for (size_t lane = 0; lane < LANES * STRETCH; lane += STRETCH)
                stream_line(dst + line + lane, src + line + lane);
    for (; at + LINE <= bytes; at += LINE)
        stream_line(dst + at, src + at);
    memcpy(dst + at, src + at, bytes - at);
}
#endif

/* Page src_slots[i] of src becomes page dst_slots[i] of dst. All is in memory, in order, when this returns. */
void hicache_stream_pages(char *dst, const int32_t *dst_slots, const char *src, const int32_t *src_slots, size_t count,
                          size_t page_bytes) {
#ifdef __SSE2__
    if (((uintptr_t)dst | page_bytes) % 16 == 0) {
        for (size_t i = 0; i < count; i++)
            stream_page(dst + (size_t)dst_slots[i] * page_bytes, src + (size_t)src_slots[i] * page_bytes, page_bytes);
        _mm_sfence();
        return;
    }
#endif
    for (size_t i = 0; i < count; i++)
        memcpy(dst + (size_t)dst_slots[i] * page_bytes, src + (size_t)src_slots[i] * page_bytes, page_bytes);
}
