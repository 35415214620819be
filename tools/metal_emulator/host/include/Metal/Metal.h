// Metal compute API, as far as a hub kernel's host code goes. Selectors and enum values are checked against
// pyobjc-framework-Metal.
#pragma once
#import <Foundation/Foundation.h>
typedef struct {
  NSUInteger width, height, depth;
} MTLSize;
static inline MTLSize MTLSizeMake(NSUInteger w, NSUInteger h, NSUInteger d) {
  MTLSize s = {w, h, d};
  return s;
}
typedef enum MTLDataType : NSUInteger {
  MTLDataTypeFloat = 3,
  MTLDataTypeHalf = 16,
  MTLDataTypeInt = 29,
  MTLDataTypeUInt = 33,
  MTLDataTypeShort = 37,
  MTLDataTypeUShort = 41,
  MTLDataTypeBool = 53,
  MTLDataTypeLong = 81,
  MTLDataTypeULong = 85
} MTLDataType;
typedef enum MTLResourceOptions : NSUInteger {
  MTLResourceStorageModeShared = 0,
  MTLResourceStorageModePrivate = 32
} MTLResourceOptions;
typedef enum MTLBarrierScope : NSUInteger { MTLBarrierScopeBuffers = 1 } MTLBarrierScope;
typedef enum MTLDispatchType : NSUInteger { MTLDispatchTypeSerial = 0, MTLDispatchTypeConcurrent = 1 } MTLDispatchType;
typedef enum MTLLanguageVersion : NSUInteger {
  MTLLanguageVersion3_0 = 196608,
  MTLLanguageVersion3_1 = 196609,
  MTLLanguageVersion3_2 = 196610,
  MTLLanguageVersion4_0 = 262144
} MTLLanguageVersion;
typedef enum MTLMathMode : NSInteger { MTLMathModeSafe = 0, MTLMathModeRelaxed = 1, MTLMathModeFast = 2 } MTLMathMode;
typedef enum MTLGPUFamily : NSInteger {
  MTLGPUFamilyApple7 = 1007,
  MTLGPUFamilyApple8 = 1008,
  MTLGPUFamilyApple9 = 1009,
  MTLGPUFamilyMetal3 = 5001
} MTLGPUFamily;
@protocol MTLDevice
, MTLBuffer, MTLLibrary, MTLFunction, MTLComputePipelineState, MTLCommandQueue, MTLCommandBuffer,
    MTLComputeCommandEncoder, MTLBlitCommandEncoder, MTLSharedEvent;
typedef void (^MTLCommandBufferHandler)(id<MTLCommandBuffer>);
@interface MTLCompileOptions : NSObject
MTL_IVARS(MTLLanguageVersion lv; MTLMathMode mm)
@property(nonatomic) MTLLanguageVersion languageVersion;
@property(nonatomic) MTLMathMode mathMode;
@end
@interface MTLFunctionConstantValues : NSObject
MTL_IVARS(void* constants)
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index;
- (void)setConstantValue:(const void*)value type:(MTLDataType)type withName:(NSString*)name;
@end
@protocol MTLResource <NSObject>
@property(copy, atomic) NSString* label;
@end
@protocol MTLBuffer <MTLResource>
@property(readonly) NSUInteger length;
- (void*)contents;
@property(readonly) uint64_t gpuAddress;
@end
@protocol MTLFunction <NSObject>
@property(readonly) NSString* name;
@end
@protocol MTLLibrary <NSObject>
@property(readonly) NSArray<NSString*>* functionNames;
- (id<MTLFunction>)newFunctionWithName:(NSString*)name;
- (id<MTLFunction>)newFunctionWithName:(NSString*)name constantValues:(MTLFunctionConstantValues*)c error:(NSError**)e;
@end
@protocol MTLComputePipelineState <NSObject>
@property(readonly) NSUInteger maxTotalThreadsPerThreadgroup;
@property(readonly) NSUInteger threadExecutionWidth;
@property(readonly) NSUInteger staticThreadgroupMemoryLength;
@end
@protocol MTLCommandEncoder <NSObject>
@property(copy, atomic) NSString* label;
- (void)endEncoding;
@end
@protocol MTLComputeCommandEncoder <MTLCommandEncoder>
- (void)setComputePipelineState:(id<MTLComputePipelineState>)s;
- (void)setBytes:(const void*)b length:(NSUInteger)n atIndex:(NSUInteger)i;
- (void)setBuffer:(id<MTLBuffer>)b offset:(NSUInteger)o atIndex:(NSUInteger)i;
- (void)setBufferOffset:(NSUInteger)o atIndex:(NSUInteger)i;
- (void)setThreadgroupMemoryLength:(NSUInteger)n atIndex:(NSUInteger)i;
- (void)dispatchThreadgroups:(MTLSize)g threadsPerThreadgroup:(MTLSize)t;
- (void)dispatchThreads:(MTLSize)g threadsPerThreadgroup:(MTLSize)t;
- (void)memoryBarrierWithScope:(MTLBarrierScope)s;
@end
@protocol MTLBlitCommandEncoder <MTLCommandEncoder>
- (void)copyFromBuffer:(id<MTLBuffer>)s
          sourceOffset:(NSUInteger)so
              toBuffer:(id<MTLBuffer>)d
     destinationOffset:(NSUInteger)o
                  size:(NSUInteger)n;
- (void)fillBuffer:(id<MTLBuffer>)b range:(NSRange)r value:(uint8_t)v;
@end
@protocol MTLCommandBuffer <NSObject>
- (id<MTLComputeCommandEncoder>)computeCommandEncoder;
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)t;
- (id<MTLBlitCommandEncoder>)blitCommandEncoder;
- (void)commit;
- (void)waitUntilCompleted;
- (void)addCompletedHandler:(MTLCommandBufferHandler)b;
@property(readonly) NSError* error;
@end
@protocol MTLCommandQueue <NSObject>
- (id<MTLCommandBuffer>)commandBuffer;
@end
@protocol MTLSharedEvent <NSObject>
@end
@protocol MTLDevice <NSObject>
@property(readonly) NSString* name;
@property(readonly) NSUInteger maxThreadgroupMemoryLength;
@property(readonly) NSUInteger maxBufferLength;
@property(readonly) MTLSize maxThreadsPerThreadgroup;
- (id<MTLCommandQueue>)newCommandQueue;
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)n options:(MTLResourceOptions)o;
- (id<MTLBuffer>)newBufferWithBytes:(const void*)p length:(NSUInteger)n options:(MTLResourceOptions)o;
- (id<MTLLibrary>)newDefaultLibrary;
- (id<MTLLibrary>)newLibraryWithData:(dispatch_data_t)d error:(NSError**)e;
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)s options:(MTLCompileOptions*)o error:(NSError**)e;
- (id<MTLLibrary>)newLibraryWithURL:(NSURL*)u error:(NSError**)e;
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)f error:(NSError**)e;
- (BOOL)supportsFamily:(MTLGPUFamily)f;
@end
#ifdef __cplusplus
extern "C"
#endif
    id<MTLDevice> MTLCreateSystemDefaultDevice(void);
