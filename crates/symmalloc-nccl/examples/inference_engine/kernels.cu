// The kernels of the engine. Sums have a fixed order and every operation is rounded once (no fused multiply-add), so that
// `reference.rs` computes the same bits. A row is a token of a request, with its position and the pages of its keys and values.

#define LANES 32
#define NO_POSITION (~0ull)

struct Row {
    unsigned long long token, position;
    float *pages[PAGES];
};

__device__ float over_lanes(float sum) {
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

__device__ float dot(const float *a, const float *b, int count, int lane) {
    float sum = 0.0f;
    for (int at = lane; at < count; at += LANES) sum += a[at] * b[at];
    return over_lanes(sum);
}

__device__ float exponential(float x) {
    x = fminf(fmaxf(x, -80.0f), 80.0f);
    float whole = rintf(x * 1.44269504f);
    float rest = x - whole * 0.6933594f;
    rest = rest - whole * -0.00021219444f;
    float sum = 0.008333333f;
    sum = sum * rest + 0.041666668f;
    sum = sum * rest + 0.16666667f;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    return sum * __int_as_float(((int)whole + 127) << 23);
}

// One block of HIDDEN threads per row.
extern "C" __global__ void embed(float *x, const Row *rows, const float *tokens, const float *positions) {
    const Row *row = rows + blockIdx.x;
    int at = threadIdx.x;
    bool is_there = row->position != NO_POSITION;
    x[blockIdx.x * HIDDEN + at] = is_there ? tokens[row->token * HIDDEN + at] + positions[row->position * HIDDEN + at] : 0.0f;
}

// One warp per row.
extern "C" __global__ void normalize(float *y, const float *x) {
    int lane = threadIdx.x;
    x += blockIdx.x * HIDDEN;
    y += blockIdx.x * HIDDEN;
    float scale = 1.0f / sqrtf(dot(x, x, HIDDEN, lane) / (float)HIDDEN + EPSILON);
    for (int at = lane; at < HIDDEN; at += LANES) y[at] = x[at] * scale;
}

// One warp per output of each row: grid (outputs / 8, rows), 256 threads.
extern "C" __global__ void product(float *y, const float *x, const float *weights, int outputs, int inputs, int is_silu) {
    int lane = threadIdx.x % LANES, output = blockIdx.x * 8 + threadIdx.x / LANES;
    float sum = dot(weights + (long long)output * inputs, x + (long long)blockIdx.y * inputs, inputs, lane);
    if (is_silu) sum = sum / (1.0f + exponential(-sum));
    if (lane == 0) y[(long long)blockIdx.y * outputs + output] = sum;
}

// Like `product`, in equal parts of the inputs. Each part is rounded to a multiple of 1 / STEPS, so that their sum is exact.
extern "C" __global__ void product_in_parts(float *y, const float *x, const float *weights, int outputs, int inputs, int parts) {
    int lane = threadIdx.x % LANES, output = blockIdx.x * 8 + threadIdx.x / LANES, length = inputs / parts;
    x += (long long)blockIdx.y * inputs;
    weights += (long long)output * inputs;
    float sum = 0.0f;
    for (int part = 0; part < parts; part++)
        sum += rintf(dot(weights + part * length, x + part * length, length, lane) * STEPS) / STEPS;
    if (lane == 0) y[(long long)blockIdx.y * outputs + output] = sum;
}

// Returns the data of a layer in a page: the keys of its positions, then the values.
__device__ float *in_page(const Row *row, int layer, int which, unsigned long long position) {
    return row->pages[position / PAGE] + ((layer * 2 + which) * PAGE + position % PAGE) * WIDTH;
}

// One block of WIDTH threads per row: stores this rank's keys and values in their page.
extern "C" __global__ void keep(const float *qkv, const Row *rows, int layer) {
    const Row *row = rows + blockIdx.x;
    if (row->position == NO_POSITION) return;
    for (int which = 0; which < 2; which++)
        in_page(row, layer, which, row->position)[threadIdx.x] = qkv[(blockIdx.x * 3 + 1 + which) * WIDTH + threadIdx.x];
}

// One warp per head of each row: grid (heads, rows).
extern "C" __global__ void attention(float *found, const float *qkv, const Row *rows, int layer) {
    __shared__ float scores[POSITIONS];
    const Row *row = rows + blockIdx.y;
    int lane = threadIdx.x, first = blockIdx.x * HEAD;
    found += blockIdx.y * WIDTH + first;
    if (row->position == NO_POSITION) {
        for (int at = lane; at < HEAD; at += LANES) found[at] = 0.0f;
        return;
    }
    const float *query = qkv + blockIdx.y * 3 * WIDTH + first;
    int count = (int)row->position + 1;
    float most = -3.402823466e38f;
    for (int at = lane; at < count; at += LANES) {
        const float *key = in_page(row, layer, 0, at) + first;
        float score = 0.0f;
        for (int i = 0; i < HEAD; i++) score += query[i] * key[i];
        scores[at] = score * SCORE_SCALE;
        most = fmaxf(most, scores[at]);
    }
    for (int apart = 16; apart > 0; apart /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
    for (int at = lane; at < count; at += LANES) scores[at] = exponential(scores[at] - most);
    __syncwarp();
    float total = 0.0f;
    for (int at = 0; at < count; at++) total += scores[at];
    for (int i = lane; i < HEAD; i += LANES) {
        float sum = 0.0f;
        for (int at = 0; at < count; at++) sum += scores[at] * in_page(row, layer, 1, at)[first + i];
        found[i] = sum / total;
    }
}

extern "C" __global__ void add(float *x, const float *more) {
    int at = blockIdx.x * HIDDEN + threadIdx.x;
    x[at] += more[at];
}

// One block of 256 threads per row: finds the first of the largest scores.
extern "C" __global__ void largest(unsigned int *tokens, const float *scores) {
    __shared__ float values[256];
    __shared__ unsigned int places[256];
    int thread = threadIdx.x;
    scores += blockIdx.x * VOCABULARY;
    unsigned int place = thread;
    for (unsigned int at = thread + 256; at < VOCABULARY; at += 256)
        if (scores[at] > scores[place]) place = at;
    values[thread] = scores[place];
    places[thread] = place;
    for (int apart = 128; apart > 0; apart /= 2) {
        __syncthreads();
        if (thread >= apart) continue;
        float other = values[thread + apart];
        unsigned int there = places[thread + apart];
        if (other > values[thread] || (other == values[thread] && there < places[thread])) {
            values[thread] = other;
            places[thread] = there;
        }
    }
    if (thread == 0) tokens[blockIdx.x] = places[0];
}
