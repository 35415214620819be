// Metal, Foundation and libdispatch for Linux, as far as the host code of a kernel goes: its real calls end in the
// emulator. What Metal's validation layer or the driver would refuse is refused here.
#include "fake_metal.h"

#import <Metal/Metal.h>
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>
#include <dlfcn.h>
#include <objc/runtime.h>
#include <unwind.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime.h"

namespace fake {
namespace {

std::atomic<uint32_t> seed{0};
std::map<std::string, uint32_t> thread_limits;  // part of a kernel's name -> maxTotalThreadsPerThreadgroup
std::atomic<int> num_libraries, num_pipelines, num_commits;
std::string last_failure;
std::string dispatched;  // "kernel threadgroups x y z threads x y z" a line
dispatch_queue_t stream_queue = nullptr;

// The emulator in the shared library of some kernels.
struct Emulator {
  decltype(&mtl_find) find;
  decltype(&mtl_max_threads) max_threads;
  decltype(&mtl_dispatch) dispatch;
  decltype(&mtl_arguments_new) arguments_new;
  decltype(&mtl_arguments_free) arguments_free;
  decltype(&mtl_set_buffer) set_buffer;
  decltype(&mtl_set_bytes) set_bytes;
  decltype(&mtl_set_threadgroup_memory) set_threadgroup_memory;
  decltype(&mtl_set_constant) set_constant;
};

Emulator* load(const std::string& path) {
  static std::map<std::string, Emulator> loaded;
  if (auto at = loaded.find(path); at != loaded.end()) return &at->second;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) fail("%s", dlerror());
  auto symbol = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function) fail("%s lacks %s", path.c_str(), name);
  };
  Emulator e;
  symbol(e.find, "mtl_find");
  symbol(e.max_threads, "mtl_max_threads");
  symbol(e.dispatch, "mtl_dispatch");
  symbol(e.arguments_new, "mtl_arguments_new");
  symbol(e.arguments_free, "mtl_arguments_free");
  symbol(e.set_buffer, "mtl_set_buffer");
  symbol(e.set_bytes, "mtl_set_bytes");
  symbol(e.set_threadgroup_memory, "mtl_set_threadgroup_memory");
  symbol(e.set_constant, "mtl_set_constant");
  return &(loaded[path] = e);
}

}  // namespace

void fail(const char* format, ...) {
  char text[4096];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  last_failure = std::string("[fake Metal] ") + text;
  throw std::runtime_error(last_failure);
}

bool drop_work = false;

void set_stream_queue(dispatch_queue_t queue) { stream_queue = queue; }

}  // namespace fake
using namespace fake;

// ---- Foundation

@implementation NSObject
+ (instancetype)alloc {
  NSObject* object = class_createInstance(self, 0);
  object->_references = 1;
  return object;
}
+ (instancetype)new {
  return [[self alloc] init];
}
+ (Class)class {
  return self;
}
- (instancetype)init {
  return self;
}
- (Class)class {
  return object_getClass(self);
}
- (NSString*)description {
  return [NSString stringWithUTF8String:object_getClassName(self)];
}
- (instancetype)retain {
  if (__atomic_fetch_add(&_references, 1, __ATOMIC_RELAXED) < 1) fail("retain of a dead %s", object_getClassName(self));
  return self;
}
- (oneway void)release {
  const int references = __atomic_sub_fetch(&_references, 1, __ATOMIC_ACQ_REL);
  if (references < 0) fail("one release too many of a %s", object_getClassName(self));
  if (references == 0) [self dealloc];
}
- (NSUInteger)retainCount {
  return _references;
}
static thread_local std::vector<std::vector<id>> pools(1);
- (instancetype)autorelease {
  pools.back().push_back(self);
  return self;
}
- (void)dealloc {
  object_dispose(self);
}
@end

@implementation NSAutoreleasePool
- (instancetype)init {
  pools.emplace_back();
  depth = pools.size();
  return self;
}
- (void)drain {
  while (pools.size() >= depth) {
    auto objects = std::move(pools.back());
    pools.pop_back();
    for (id object : objects) [object release];
  }
  [self release];
}
@end

@interface FakeString : NSString {
 @public
  std::string* text;
}
@end
@implementation NSString
+ (instancetype)stringWithUTF8String:(const char*)text {
  FakeString* string = [FakeString new];
  string->text = new std::string(text);
  return (id)[string autorelease];
}
+ (instancetype)stringWithFormat:(NSString*)format, ... {
  char text[4096];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format.UTF8String, list);
  va_end(list);
  return [self stringWithUTF8String:text];
}
- (const char*)UTF8String {
  return "";
}
@end
@implementation FakeString
- (const char*)UTF8String {
  return text->c_str();
}
- (void)dealloc {
  delete text;
  [super dealloc];
}
@end
@implementation NSConstantString
- (const char*)UTF8String {
  return ((const char**)self)[1];  // as the compiler lays out @"text": class, characters, length
}
- (instancetype)retain {
  return self;
}
- (oneway void)release {
}
- (instancetype)autorelease {
  return self;
}
@end

@interface FakeError : NSError {
 @public
  NSString* message;
}
@end
@implementation NSError
- (NSString*)localizedDescription {
  return nil;
}
- (NSInteger)code {
  return 1;
}
@end
@implementation FakeError
- (NSString*)localizedDescription {
  return message;
}
- (void)dealloc {
  [message release];
  [super dealloc];
}
@end
static id set_error(NSError** error, const std::string& message) {
  if (error) {
    FakeError* fresh = [FakeError new];
    fresh->message = [[NSString stringWithUTF8String:message.c_str()] retain];
    *error = [fresh autorelease];
  }
  return nil;
}
@implementation NSArray
- (NSUInteger)count {
  return 0;
}
@end
@implementation NSDictionary
@end

// ---- libdispatch: serial queues that know who is on them

struct dispatch_queue_s {
  std::string name;
  std::mutex mutex;
  std::atomic<std::thread::id> owner;
};
struct dispatch_data_s {
  std::string bytes;
};

bool fake::on_queue(dispatch_queue_t queue) { return queue->owner == std::this_thread::get_id(); }

extern "C" {
dispatch_queue_t dispatch_queue_create(const char* name, void*) {
  auto* queue = new dispatch_queue_s;
  queue->name = name;
  return queue;
}
dispatch_queue_t dispatch_get_main_queue() {
  static dispatch_queue_t queue = dispatch_queue_create("main", nullptr);
  return queue;
}
// libdispatch is C: an exception that leaves the block ends the process.
void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block) noexcept {
  if (on_queue(queue)) {
    fprintf(stderr, "[fake Metal] dispatch_sync on queue '%s' from itself: deadlock\n", queue->name.c_str());
    abort();
  }
  std::lock_guard lock(queue->mutex);
  queue->owner = std::this_thread::get_id();
  block();
  queue->owner = std::thread::id();
}
dispatch_data_t dispatch_data_create(const void* data, size_t size, dispatch_queue_t, dispatch_block_t) {
  return new dispatch_data_s{std::string(static_cast<const char*>(data), size)};
}
}

// ---- Metal: resources, libraries, pipelines

@interface FakeBuffer : NSObject <MTLBuffer> {
 @public
  void* data;
  size_t size;
  NSString* _label;
}
@end
@implementation FakeBuffer
@synthesize label = _label;
- (NSUInteger)length {
  return size;
}
- (void*)contents {
  return data;
}
- (uint64_t)gpuAddress {
  return reinterpret_cast<uint64_t>(data);
}
- (void)dealloc {
  free(data);
  [super dealloc];
}
@end

using Constants = std::map<NSUInteger, std::string>;

@implementation MTLCompileOptions
@synthesize languageVersion = lv, mathMode = mm;
@end

@implementation MTLFunctionConstantValues
- (instancetype)init {
  constants = new Constants;
  return self;
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index {
  size_t size = 4;
  if (type == MTLDataTypeBool)
    size = 1;
  else if (type == MTLDataTypeShort || type == MTLDataTypeUShort || type == MTLDataTypeHalf)
    size = 2;
  else if (type == MTLDataTypeLong || type == MTLDataTypeULong)
    size = 8;
  (*static_cast<Constants*>(constants))[index] = std::string(static_cast<const char*>(value), size);
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type withName:(NSString*)name {
  fail("function constants by name are not in the fake");
}
- (void)dealloc {
  delete static_cast<Constants*>(constants);
  [super dealloc];
}
@end

@interface FakeFunction : NSObject <MTLFunction> {
 @public
  Emulator* emulator;
  const mtl::Kernel* kernel;
  std::string* name;
  Constants* constants;
}
@end
@implementation FakeFunction
- (NSString*)name {
  return [NSString stringWithUTF8String:name->c_str()];
}
- (void)dealloc {
  delete name;
  delete constants;
  [super dealloc];
}
@end

@interface FakeLibrary : NSObject <MTLLibrary> {
 @public
  std::vector<Emulator*>* emulators;
}
@end
@implementation FakeLibrary
- (NSArray*)functionNames {
  return nil;
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  return [self newFunctionWithName:name constantValues:nil error:nullptr];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name
                        constantValues:(MTLFunctionConstantValues*)values
                                 error:(NSError**)error {
  for (Emulator* emulator : *emulators) {
    const mtl::Kernel* kernel = emulator->find(name.UTF8String);
    if (!kernel) continue;
    FakeFunction* function = [FakeFunction new];
    function->emulator = emulator;
    function->kernel = kernel;
    function->name = new std::string(name.UTF8String);
    function->constants = new Constants(values ? *static_cast<Constants*>(values->constants) : Constants{});
    return function;
  }
  return set_error(error, std::string("function ") + name.UTF8String + " was not found in the library");
}
- (void)dealloc {
  delete emulators;
  [super dealloc];
}
@end

@interface FakePipeline : NSObject <MTLComputePipelineState> {
 @public
  FakeFunction* function;
}
@end
@implementation FakePipeline
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  NSUInteger limit = function->emulator->max_threads(function->kernel);
  for (auto& [part, threads] : thread_limits)
    if (function->name->find(part) != std::string::npos) limit = MIN(limit, threads);
  return limit;
}
- (NSUInteger)threadExecutionWidth {
  return mtl::kSimdWidth;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return 0;
}
- (void)dealloc {
  [function release];
  [super dealloc];
}
@end

// ---- Metal: command buffers and encoders. Encoded work runs at commit, as on a GPU.

@class FakeCommandBuffer;

struct Argument {
  enum Kind { kUnset, kBuffer, kBytes } kind = kUnset;
  FakeBuffer* buffer = nil;
  size_t offset = 0;
  std::string bytes;
};
struct Encoding {  // what the next dispatch would use
  FakePipeline* pipeline = nil;
  Argument arguments[mtl::kNumBuffers];
  size_t threadgroup_memory[mtl::kNumBuffers] = {};
};

@interface FakeEncoder : NSObject <MTLCommandEncoder> {
 @public
  NSString* _label;
  FakeCommandBuffer* command_buffer;
  bool ended;
}
- (void)requireOpen:(SEL)method;
@end
@interface FakeComputeEncoder : FakeEncoder <MTLComputeCommandEncoder> {
 @public
  Encoding* encoding;
}
@end
@interface FakeBlitEncoder : FakeEncoder <MTLBlitCommandEncoder>
@end
@interface FakeCommandBuffer : NSObject <MTLCommandBuffer> {
 @public
  std::vector<std::function<void()>>* jobs;
  FakeEncoder* open;
  bool committed;
}
- (void)openEncoder:(FakeEncoder*)encoder;
@end

@implementation FakeEncoder
@synthesize label = _label;
- (void)requireOpen:(SEL)method {
  if (ended) fail("%s after endEncoding", sel_getName(method));
  if (stream_queue && !on_queue(stream_queue)) fail("%s outside of the stream's queue", sel_getName(method));
}
- (void)endEncoding {
  if (ended && !drop_work) fail("endEncoding twice");
  ended = true;
  command_buffer->open = nil;
}
@end

@implementation FakeComputeEncoder
- (instancetype)init {
  encoding = new Encoding;
  return self;
}
- (Argument&)argument:(NSUInteger)index {
  if (index >= mtl::kNumBuffers) fail("buffer index %lu, at most %d", index, mtl::kNumBuffers - 1);
  return encoding->arguments[index];
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)pipeline {
  [self requireOpen:_cmd];
  if (!pipeline) fail("setComputePipelineState: nil");
  encoding->pipeline = (FakePipeline*)pipeline;
}
- (void)setBytes:(const void*)data length:(NSUInteger)size atIndex:(NSUInteger)index {
  [self requireOpen:_cmd];
  if (size == 0 || size > 4096) fail("setBytes of %lu bytes, 1 to 4096 are allowed", size);
  [self argument:index] = {Argument::kBytes, nil, 0, std::string(static_cast<const char*>(data), size)};
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  [self requireOpen:_cmd];
  FakeBuffer* fake_buffer = (FakeBuffer*)buffer;
  if (buffer && offset > fake_buffer->size)
    fail("setBuffer at %lu: offset %lu in a buffer of %zu bytes", index, offset, fake_buffer->size);
  [self argument:index] = {Argument::kBuffer, fake_buffer, offset, ""};
}
- (void)setBufferOffset:(NSUInteger)offset atIndex:(NSUInteger)index {
  [self requireOpen:_cmd];
  if ([self argument:index].kind != Argument::kBuffer) fail("setBufferOffset at %lu: no buffer is set", index);
  [self setBuffer:[self argument:index].buffer offset:offset atIndex:index];
}
- (void)setThreadgroupMemoryLength:(NSUInteger)size atIndex:(NSUInteger)index {
  [self requireOpen:_cmd];
  if (index >= mtl::kNumBuffers || size % 16 || size > mtl::kMaxThreadgroupBytes)
    fail("setThreadgroupMemoryLength:%lu atIndex:%lu", size, index);
  encoding->threadgroup_memory[index] = size;
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  [self requireOpen:_cmd];  // dispatches of one encoder run in order here
}
- (void)encode:(MTLSize)grid threads:(MTLSize)size whole:(bool)whole {
  if (!encoding->pipeline) fail("a dispatch without a pipeline");
  const NSUInteger threads = size.width * size.height * size.depth;
  const NSUInteger limit = encoding->pipeline.maxTotalThreadsPerThreadgroup;
  if (threads > limit)  // a device gives zeros without a word
    fail("%s: a threadgroup of %lu threads, the pipeline's maxTotalThreadsPerThreadgroup is %lu",
         encoding->pipeline->function->name->c_str(), threads, limit);
  // A command buffer keeps what it uses; later calls on the encoder change the next dispatch only.
  auto state = std::make_shared<Encoding>(*encoding);
  [state->pipeline retain];
  for (Argument& argument : state->arguments) [argument.buffer retain];
  command_buffer->jobs->push_back([=] {
    FakeFunction* function = state->pipeline->function;
    Emulator* emulator = function->emulator;
    mtl::Arguments* arguments = emulator->arguments_new();
    for (int i = 0; i < mtl::kNumBuffers; i++) {
      const Argument& argument = state->arguments[i];
      FakeBuffer* buffer = argument.buffer;
      if (argument.kind == Argument::kBytes)
        emulator->set_bytes(arguments, i, argument.bytes.data(), argument.bytes.size());
      else if (argument.kind == Argument::kBuffer && buffer)
        emulator->set_buffer(arguments, i, static_cast<char*>(buffer->data) + argument.offset,
                             buffer->size - argument.offset);
      else if (argument.kind == Argument::kBuffer)
        emulator->set_buffer(arguments, i, nullptr, 0);
      if (state->threadgroup_memory[i]) emulator->set_threadgroup_memory(arguments, i, state->threadgroup_memory[i]);
    }
    for (auto& [index, value] : *function->constants)
      emulator->set_constant(arguments, static_cast<int>(index), value.data(), value.size());
    const uint32_t counts[3] = {uint32_t(grid.width), uint32_t(grid.height), uint32_t(grid.depth)};
    const uint32_t sizes[3] = {uint32_t(size.width), uint32_t(size.height), uint32_t(size.depth)};
    char message[4096] = "", line[512];
    const int failed =
        emulator->dispatch(function->kernel, arguments, counts, sizes, whole, seed, message, sizeof message);
    snprintf(line, sizeof line, "%s %s %u %u %u threads %u %u %u\n", function->name->c_str(),
             whole ? "threadgroups" : "grid", counts[0], counts[1], counts[2], sizes[0], sizes[1], sizes[2]);
    dispatched += line;
    emulator->arguments_free(arguments);
    for (Argument& argument : state->arguments) [argument.buffer release];
    [state->pipeline release];
    if (failed) fail("%s", message);
  });
}
- (void)dispatchThreadgroups:(MTLSize)count threadsPerThreadgroup:(MTLSize)size {
  [self requireOpen:_cmd];
  [self encode:count threads:size whole:true];
}
- (void)dispatchThreads:(MTLSize)grid threadsPerThreadgroup:(MTLSize)size {
  [self requireOpen:_cmd];
  [self encode:grid threads:size whole:false];
}
- (void)dealloc {
  delete encoding;
  [super dealloc];
}
@end

@implementation FakeBlitEncoder
- (void)copyFromBuffer:(id<MTLBuffer>)source
          sourceOffset:(NSUInteger)source_offset
              toBuffer:(id<MTLBuffer>)target
     destinationOffset:(NSUInteger)target_offset
                  size:(NSUInteger)size {
  [self requireOpen:_cmd];
  FakeBuffer *from = [(FakeBuffer*)source retain], *to = [(FakeBuffer*)target retain];
  if (source_offset + size > from->size || target_offset + size > to->size) fail("copyFromBuffer: out of bounds");
  if (from == to && source_offset < target_offset + size && target_offset < source_offset + size)
    fail("copyFromBuffer: the regions overlap");
  command_buffer->jobs->push_back([=] {
    memcpy(static_cast<char*>(to->data) + target_offset, static_cast<char*>(from->data) + source_offset, size);
    [from release];
    [to release];
  });
}
- (void)fillBuffer:(id<MTLBuffer>)target range:(NSRange)range value:(uint8_t)value {
  [self requireOpen:_cmd];
  FakeBuffer* to = [(FakeBuffer*)target retain];
  if (range.location + range.length > to->size) fail("fillBuffer: out of bounds");
  command_buffer->jobs->push_back([=] {
    memset(static_cast<char*>(to->data) + range.location, value, range.length);
    [to release];
  });
}
@end

@implementation FakeCommandBuffer
- (instancetype)init {
  jobs = new std::vector<std::function<void()>>;
  return self;
}
- (void)openEncoder:(FakeEncoder*)encoder {
  if (committed) fail("an encoder on a committed command buffer");
  if (open) fail("A command encoder is already encoding to this command buffer");
  encoder->command_buffer = self;
  open = encoder;
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  FakeComputeEncoder* encoder = [[FakeComputeEncoder new] autorelease];
  [self openEncoder:encoder];
  return encoder;
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  return [self computeCommandEncoder];
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  FakeBlitEncoder* encoder = [[FakeBlitEncoder new] autorelease];
  [self openEncoder:encoder];
  return encoder;
}
- (void)commit {
  if (committed) fail("commit of a committed command buffer");
  if (open && !drop_work) fail("commit with an encoder still open");
  committed = true;
  num_commits++;
  auto work = std::move(*jobs);
  jobs->clear();
  if (drop_work) return;
  for (auto& job : work) job();
}
- (void)waitUntilCompleted {
  if (!committed) fail("waitUntilCompleted before commit");
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)handler {
}
- (NSError*)error {
  return nil;
}
- (void)dealloc {
  delete jobs;
  [super dealloc];
}
@end

@implementation MPSCommandBuffer
+ (instancetype)commandBufferFromCommandQueue:(id<MTLCommandQueue>)queue {
  MPSCommandBuffer* buffer = [self new];
  buffer->inner = [FakeCommandBuffer new];
  return [buffer autorelease];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [inner computeCommandEncoder];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  return [inner computeCommandEncoder];
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  return [inner blitCommandEncoder];
}
- (void)commit {
  [inner commit];
}
- (void)commitAndContinue {
  id<MTLCommandBuffer> done = inner;
  inner = [FakeCommandBuffer new];
  [done commit];
  [done release];
}
- (void)waitUntilCompleted {
  [inner waitUntilCompleted];
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)handler {
}
- (NSError*)error {
  return nil;
}
- (void)dealloc {
  [inner release];
  [super dealloc];
}
@end

@interface FakeQueue : NSObject <MTLCommandQueue>
@end
@implementation FakeQueue
- (id<MTLCommandBuffer>)commandBuffer {
  return [[FakeCommandBuffer new] autorelease];
}
@end

@interface FakeDevice : NSObject <MTLDevice>
@end
@implementation FakeDevice
- (NSString*)name {
  return @"emulated Apple GPU";
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return mtl::kMaxThreadgroupBytes;
}
- (NSUInteger)maxBufferLength {
  return 1ul << 34;
}
- (MTLSize)maxThreadsPerThreadgroup {
  return MTLSizeMake(mtl::kMaxThreads, mtl::kMaxThreads, mtl::kMaxThreads);
}
- (id<MTLCommandQueue>)newCommandQueue {
  return [FakeQueue new];
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)size options:(MTLResourceOptions)options {
  if (size == 0) return nil;
  FakeBuffer* buffer = [FakeBuffer new];
  buffer->size = size;
  if (posix_memalign(&buffer->data, 256, size)) fail("out of memory");
  // NaN, but for memory so large that a test leaves most of it untouched.
  if (size < size_t{1} << 30) memset(buffer->data, 0xff, size);
  return buffer;
}
- (id<MTLBuffer>)newBufferWithBytes:(const void*)data length:(NSUInteger)size options:(MTLResourceOptions)options {
  id<MTLBuffer> buffer = [self newBufferWithLength:size options:options];
  memcpy(buffer.contents, data, size);
  return buffer;
}
- (id<MTLLibrary>)newDefaultLibrary {
  return nil;
}
- (id<MTLLibrary>)newLibraryWithData:(dispatch_data_t)data error:(NSError**)error {
  const std::string prefix = "EMULATED:", &text = data->bytes;
  if (text.rfind(prefix, 0)) return set_error(error, "no metallib of the emulator");
  const char* variant = getenv("METAL_VARIANT");
  FakeLibrary* library = [FakeLibrary new];
  library->emulators = new std::vector<Emulator*>;
  for (size_t begin = prefix.size(); begin < text.size();) {
    const size_t end = MIN(text.find(';', begin), text.size());
    std::string path = text.substr(begin, end - begin);
    if (const size_t at = path.find("{variant}"); at != std::string::npos)
      path.replace(at, 9, variant ? variant : "plain");
    library->emulators->push_back(load(path));
    begin = end + 1;
  }
  num_libraries++;
  return library;
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error {
  return set_error(error, "newLibraryWithSource is not in the fake");
}
- (id<MTLLibrary>)newLibraryWithURL:(NSURL*)url error:(NSError**)error {
  return set_error(error, "newLibraryWithURL is not in the fake");
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError**)error {
  if (!function) fail("newComputePipelineStateWithFunction: nil");
  FakePipeline* pipeline = [FakePipeline new];
  pipeline->function = [(FakeFunction*)function retain];
  num_pipelines++;
  return pipeline;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  return family <= MTLGPUFamilyApple9;
}
@end

extern "C" id<MTLDevice> MTLCreateSystemDefaultDevice(void) {
  static FakeDevice* device = [FakeDevice new];
  return device;
}

// Clang gives Objective-C++ the personality of the Objective-C runtime, and GNU's cannot catch a C++ exception. No
// Objective-C exception exists here: the personality of C++ serves all.
extern "C" {
_Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, uint64_t, _Unwind_Exception*, _Unwind_Context*);
_Unwind_Reason_Code __gnu_objc_personality_v0(int version, _Unwind_Action actions, uint64_t exception_class,
                                              _Unwind_Exception* exception, _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, exception_class, exception, context);
}
}

// ---- for fake_mps.py

extern "C" {
const char* fake_last_failure() { return last_failure.c_str(); }
void fake_set_seed(uint32_t value) { seed = value; }
void fake_limit_threads(const char* part_of_name, uint32_t threads) {
  if (threads)
    thread_limits[part_of_name] = threads;
  else
    thread_limits.erase(part_of_name);
}
int fake_num_libraries() { return num_libraries; }
int fake_num_pipelines() { return num_pipelines; }
int fake_num_commits() { return num_commits; }
const char* fake_dispatched() { return dispatched.c_str(); }
void fake_reset_dispatched() { dispatched.clear(); }
}
