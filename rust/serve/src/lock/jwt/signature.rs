//! Signatures of tokens, checked with ring as those of certificates are: of the library's own ways one needs cmake
//! to build, and the other one has an open advisory.

use jsonwebtoken::crypto::{CryptoProvider, JwtSigner, JwtVerifier, KeyUtils};
use jsonwebtoken::errors::{ErrorKind, Result};
use jsonwebtoken::signature::{Error as WrongSignature, Verifier};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind, EncodingKey};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256,
    RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512, RSA_PSS_2048_8192_SHA256,
    RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512, RsaParameters, RsaPublicKeyComponents,
    UnparsedPublicKey, VerificationAlgorithm,
};

/// Bits of an RSA key that ring takes.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2_048..=8_192;

static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: no_signer,
    verifier_factory: verifier,
    key_utils: KeyUtils::new_unimplemented(),
};

/// Have the library check signatures so in this process.
pub(super) fn install() {
    // Once is enough; this process has no other one.
    let _again = PROVIDER.install_default();
}

fn no_signer(_: &Algorithm, _: &EncodingKey) -> Result<Box<dyn JwtSigner>> {
    Err(ErrorKind::UnsupportedAlgorithm.into())
}

fn verifier(algorithm: &Algorithm, key: &DecodingKey) -> Result<Box<dyn JwtVerifier>> {
    let way = Way::of(*algorithm, key).ok_or(ErrorKind::UnsupportedAlgorithm)?;
    Ok(Box::new(RingVerifier { algorithm: *algorithm, way }))
}

/// Whether signatures of this algorithm can be checked by this key.
///
/// # Errors
/// Why not, in words.
pub(super) fn check(algorithm: Algorithm, key: &DecodingKey) -> std::result::Result<(), String> {
    let way = Way::of(algorithm, key).ok_or_else(|| format!("{algorithm:?} is not supported"))?;
    match way {
        Way::Rsa { n, .. } => {
            let bits = n.iter().skip_while(|byte| **byte == 0).count() * 8;
            if RSA_BITS.contains(&bits) {
                return Ok(());
            }
            let (least, most) = (RSA_BITS.start(), RSA_BITS.end());
            Err(format!("an RSA key must have {least} to {most} bits, got {bits}"))
        }
        Way::Other { key, bytes, .. } if key.len() != bytes => {
            Err(format!("a key of {algorithm:?} must have {bytes} bytes, got {}", key.len()))
        }
        Way::Other { .. } => Ok(()),
    }
}

/// How a signature is checked.
enum Way {
    Rsa { parameters: &'static RsaParameters, n: Vec<u8>, e: Vec<u8> },
    Other { algorithm: &'static dyn VerificationAlgorithm, key: Vec<u8>, bytes: usize },
}

impl Way {
    fn of(algorithm: Algorithm, key: &DecodingKey) -> Option<Self> {
        let rsa = |parameters| match key.kind() {
            DecodingKeyKind::RsaModulusExponent { n, e } => {
                Some(Self::Rsa { parameters, n: n.clone(), e: e.clone() })
            }
            DecodingKeyKind::SecretOrDer(_) => None,
        };
        let other = |algorithm, bytes| match key.kind() {
            DecodingKeyKind::SecretOrDer(key) => {
                Some(Self::Other { algorithm, key: key.clone(), bytes })
            }
            DecodingKeyKind::RsaModulusExponent { .. } => None,
        };
        match algorithm {
            Algorithm::RS256 => rsa(&RSA_PKCS1_2048_8192_SHA256),
            Algorithm::RS384 => rsa(&RSA_PKCS1_2048_8192_SHA384),
            Algorithm::RS512 => rsa(&RSA_PKCS1_2048_8192_SHA512),
            Algorithm::PS256 => rsa(&RSA_PSS_2048_8192_SHA256),
            Algorithm::PS384 => rsa(&RSA_PSS_2048_8192_SHA384),
            Algorithm::PS512 => rsa(&RSA_PSS_2048_8192_SHA512),
            // A point in its long form.
            Algorithm::ES256 => other(&ECDSA_P256_SHA256_FIXED, 65),
            Algorithm::ES384 => other(&ECDSA_P384_SHA384_FIXED, 97),
            Algorithm::EdDSA => other(&ED25519, 32),
            // Those by one secret, and those that the library may yet learn.
            _ => None,
        }
    }
}

struct RingVerifier {
    algorithm: Algorithm,
    way: Way,
}

impl Verifier<Vec<u8>> for RingVerifier {
    fn verify(
        &self,
        message: &[u8],
        signature: &Vec<u8>,
    ) -> std::result::Result<(), WrongSignature> {
        let checked = match &self.way {
            Way::Rsa { parameters, n, e } => {
                RsaPublicKeyComponents { n, e }.verify(parameters, message, signature)
            }
            Way::Other { algorithm, key, .. } => {
                UnparsedPublicKey::new(*algorithm, key).verify(message, signature)
            }
        };
        checked.map_err(|_| WrongSignature::new())
    }
}

impl JwtVerifier for RingVerifier {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}
