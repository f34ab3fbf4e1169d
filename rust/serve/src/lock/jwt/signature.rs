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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;

    use super::*;

    /// # Source
    /// RFC 7515, appendix A.2.
    #[test]
    fn an_rsa_signature_of_the_standard_is_right() {
        const MODULUS: &str = concat!(
            "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp-Vaw-4qPCJrcS2mJPMEzP1Pt",
            "0Bm4d4QlL-yRT-SFd2lZS-pCgNMsD1W_YpRPEwOWvG6b32690r2jZ47soMZo9wGzjb_7OMg0LOL-bSf63kpaSHSX",
            "ndS5z5rexMdbBYUsLA9e-KXBdQOS-UTo7WTBEMa2R2CapHg665xsmtdVMTBQY4uDZlxvb3qCo5ZwKh9kG4LT6_I5",
            "IhlJH7aGhyxXFvUK-DWNmoudF8NAco9_h9iaGNj8q2ethFkMLs91kzk2PAcDTW9gb54h4FRWyuXpoQ"
        );
        const MESSAGE: &str = concat!(
            "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGx",
            "lLmNvbS9pc19yb290Ijp0cnVlfQ"
        );
        const SIGNATURE: &str = concat!(
            "cC4hiUPoj9Eetdgtv3hF80EGrhuB__dzERat0XF9g2VtQgr9PJbu3XOiZj5RZmh7AAuHIm4Bh-0Qc_lF5YKt_O8W",
            "2Fp5jujGbds9uJdbF9CUAr7t1dnZcAcQjbKBYNX4BAynRFdiuB--f_nZLgrnbyTyWzO75vRK5h6xBArLIARNPvkS",
            "jtQBMHlb1L07Qe7K0GarZRmB_eSN9383LcOLn6_dO--xi12jzDwusC-eOkHWEsqtFZESc6BfI7noOPqvhJ1phCnv",
            "Wh6IeYI2w9QOYEUipUTI8np6LbgGY9Fs98rqVt5AXLIhWkWywlVmtVrBp0igcN_IoypGlUPQGe77Rw"
        );
        let key = DecodingKey::from_rsa_components(MODULUS, "AQAB").unwrap();
        let signature = URL_SAFE_NO_PAD.decode(SIGNATURE).unwrap();
        for (algorithm, is_right) in
            [(Algorithm::RS256, true), (Algorithm::RS384, false), (Algorithm::PS256, false)]
        {
            check(algorithm, &key).unwrap();
            let verifier = verifier(&algorithm, &key).unwrap();
            assert_eq!(verifier.verify(MESSAGE.as_bytes(), &signature).is_ok(), is_right);
        }
        let right = verifier(&Algorithm::RS256, &key).unwrap();
        assert!(right.verify(format!("{MESSAGE}x").as_bytes(), &signature).is_err());
        let small = DecodingKey::from_rsa_components("AQAB", "AQAB").unwrap();
        assert!(check(Algorithm::RS256, &small).unwrap_err().contains("2048 to 8192 bits, got 24"));
        let secret = DecodingKey::from_secret(b"a secret");
        assert!(check(Algorithm::HS256, &secret).unwrap_err().contains("HS256 is not supported"));
    }
}
